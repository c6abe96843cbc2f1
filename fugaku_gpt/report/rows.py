"""Defines one row of a table: a configuration and its measured figures, with units in the names of raw values."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.formulas.flops import EXACT_FORMULA, NOTES_FORMULA
from fugaku_gpt.records.accounting import ENERGY_FORMULA
from fugaku_gpt.records.run import OK
from fugaku_gpt.report.trainer_logs import OURS

UNFINISHED = "unfinished"  # no result was recorded: still running, or killed together with its starter
FROM_LOG = "from a log of"  # the first words of the remark on a row that was imported
UNREADABLE = "unreadable"  # a file of the run is damaged; the reason names it
NO_STATUS = ""  # a hand-written table that does not state how a run ended


@dataclass(frozen=True)
class ResultRow:
    """A configuration with its figures, built from run directories or from a hand-written table.

    Attributes:
        size: size of the model as tables write it, such as 124M.
        torch: major.minor of the PyTorch build; empty if unknown.
        freq_mhz, tcmalloc, retention_state: toggles as applied; None, False and None mean the machine's default.
        knobs: (name, value) of further power knobs that were applied.
        not_applied: toggles that were requested but not applied, as tables write them.
        node_used_bytes: used memory of one node, all ranks and the system.
        tflops_notes, tflops_exact: TFLOP/s of one node by the two formulas.
        evaluations: (name, first loss, last loss) of each of ``training.eval_files``.
        images_per_second, last_validation_accuracy, compile_seconds: of classifiers of grids; the last is the time of
            the first iteration beyond a later one.
        status: one of ``records.run.STATUSES``, ``UNFINISHED``, ``UNREADABLE``, a job's state, or ``NO_STATUS``.
        date: MM-DD in UTC.
        remarks: further notes, such as ``n=3``.
        runs: directories that the figures come from.
        settings: (dotted key, value) of the settings that differ from their defaults.
        layers, hidden, heads: shape of the model; None if unknown.
        hardware: processor of the run's nodes, or the machine that a row of reference names; empty if unknown.
        samples_per_second: rate as a sheet states it; else it follows from batch and time.
        is_reference: whether the row is of a sheet or table of others, and not of a run in a directory.
        trainer: the trainer that the figures come from, if it is not this one.
        energy_joules: energy of the run's jobs on all nodes, start-up included; measured, else the scheduler's ideal
            value.
        watts_per_node: average over the run's jobs.
        joules_per_iteration, joules_per_token: average power times time per iteration.
        energy_basis: measured or ideal, or why there is no energy.
    """

    size: str
    seq_len: Optional[int]
    nodes: Optional[int]
    dp: Optional[int]
    tp: Optional[int]
    pp: Optional[int]
    micro_batch: Optional[int]
    global_batch: Optional[int]
    ranks_per_node: int = 1
    recompute: bool = False
    torch: str = ""
    dtype: str = "float32"
    threads_per_rank: Optional[int] = None
    freq_mhz: Optional[int] = None
    tcmalloc: bool = False
    retention_state: Optional[int] = None
    knobs: Tuple[Tuple[str, int], ...] = ()
    not_applied: Tuple[str, ...] = ()
    node_used_bytes: Optional[float] = None
    rss_max_bytes: Optional[float] = None
    seconds_per_iteration: Optional[float] = None
    tokens_per_second: Optional[float] = None
    tflops_notes: Optional[float] = None
    tflops_exact: Optional[float] = None
    formula_notes: str = NOTES_FORMULA
    formula_exact: str = EXACT_FORMULA
    first_loss: Optional[float] = None
    last_loss: Optional[float] = None
    first_validation_loss: Optional[float] = None
    last_validation_loss: Optional[float] = None
    evaluations: Tuple[Tuple[str, float, float], ...] = ()
    images_per_second: Optional[float] = None
    last_validation_accuracy: Optional[float] = None
    compile_seconds: Optional[float] = None
    iterations: int = 0
    status: str = OK
    reason: str = ""
    date: str = ""
    job_id: str = ""
    remarks: Tuple[str, ...] = ()
    torch_build: str = ""
    git_commit: str = ""
    attempts: int = 1
    sweep: str = ""
    order: int = 0
    digest: str = ""
    runs: Tuple[str, ...] = ()
    trainer: str = ""
    energy_joules: Optional[float] = None
    watts_per_node: Optional[float] = None
    joules_per_iteration: Optional[float] = None
    joules_per_token: Optional[float] = None
    energy_basis: str = ""
    settings: Tuple[Tuple[str, Any], ...] = ()
    layers: Optional[int] = None
    hidden: Optional[int] = None
    heads: Optional[int] = None
    hardware: str = ""
    samples_per_second: Optional[float] = None
    is_reference: bool = False

    @property
    def samples_rate(self) -> Optional[float]:
        """Samples per second: as stated, else the global batch over the seconds per iteration."""
        if self.samples_per_second is not None or not self.global_batch or not self.seconds_per_iteration:
            return self.samples_per_second
        return self.global_batch / self.seconds_per_iteration


# the knobs that tables show, in their order: those with a field of their own in a row, and those in its field `knobs`
COLUMN_KNOBS = tuple(knob for spec in fields(ResultRow) for knob in NODE_KNOBS if knob.name == spec.name)
MORE_KNOBS = tuple(knob for knob in NODE_KNOBS if knob.is_in_tables and knob not in COLUMN_KNOBS)


def merge_repeats(rows: Sequence[ResultRow]) -> ResultRow:
    """Merge runs of one configuration into one row: medians over the runs that ended well, and the largest memory.

    Remarks state the number of runs behind the medians, and how many did not end well. If none did, the row is that of
    the last run.
    """
    good = [row for row in rows if row.status == OK]
    base = good[0] if good else rows[-1]
    remarks = list(base.remarks)
    if len(good) > 1:
        remarks.append(f"n={len(good)}")
    if good and len(good) < len(rows):
        remarks.append(f"{len(rows) - len(good)} of {len(rows)} did not end well")
    attempts = max(row.attempts for row in rows)
    if attempts > 1:
        remarks.append(f"attempt {attempts}")
    values: Dict[str, Any] = dict(vars(base))
    for name in (*FIGURES, *_ENERGIES):
        values[name] = _median(getattr(row, name) for row in good or [base])
    values["evaluations"] = tuple(_merge_evaluations([row.evaluations for row in good or [base]]))
    _scale_speeds(values, base)
    for name in ("node_used_bytes", "rss_max_bytes"):
        present = [v for v in (getattr(row, name) for row in good or [base]) if v is not None]
        values[name] = max(present, default=None)
    values.update(remarks=tuple(remarks), attempts=attempts, runs=tuple(run for row in rows for run in row.runs))
    return ResultRow(**values)


def _merge_evaluations(runs: Sequence[Tuple[Tuple[str, float, float], ...]]) -> Iterator[Tuple[str, float, float]]:
    """The medians of the losses of each name, in the order of the first run."""
    for name, *_ in runs[0]:
        losses = [(first, last) for evaluations in runs for other, first, last in evaluations if other == name]
        firsts, lasts = zip(*losses)
        yield name, statistics.median(firsts), statistics.median(lasts)


def _scale_speeds(values: Dict[str, Any], base: ResultRow) -> None:
    """Derive speeds from the median time: their own medians would not match it if the number of runs is even."""
    if base.seconds_per_iteration and values["seconds_per_iteration"]:
        slower = values["seconds_per_iteration"] / base.seconds_per_iteration
        for name in ("tokens_per_second", "images_per_second", "tflops_notes", "tflops_exact"):
            speed = getattr(base, name)
            values[name] = speed / slower if speed is not None else None


FIGURES = (
    "seconds_per_iteration",
    "tokens_per_second",
    "tflops_notes",
    "tflops_exact",
    "first_loss",
    "last_loss",
    "first_validation_loss",
    "last_validation_loss",
    "images_per_second",
    "last_validation_accuracy",
    "compile_seconds",
)
_ENERGIES = ("energy_joules", "watts_per_node", "joules_per_iteration", "joules_per_token")


def values_of_rows(rows: Sequence[ResultRow]) -> List[Dict[str, Any]]:
    """Return the raw values of a table's rows; with hardware and samples per second if one is a row of reference."""
    values = [raw_values(row) for row in rows]
    if any(row.is_reference for row in rows):
        for row, shown in zip(rows, values):
            shown.update(hardware=row.hardware, samples_per_second=row.samples_rate)
    return values


def raw_values(row: ResultRow) -> Dict[str, Any]:
    """Return a row for CSV and JSON: raw values with units in the names, and where they come from; figures of
    grids and the losses of evaluation files come last, if it has any."""
    return {
        "model": row.size,
        "sequence_length_tokens": row.seq_len,
        "activation_checkpointing": row.recompute,
        "torch": row.torch,
        "torch_build": row.torch_build,
        "dtype": row.dtype,
        "nodes": row.nodes,
        "ranks_per_node": row.ranks_per_node,
        "threads_per_rank": row.threads_per_rank,
        "dp": row.dp,
        "tp": row.tp,
        "pp": row.pp,
        "micro_batch_sequences": row.micro_batch,
        "global_batch_sequences": row.global_batch,
        "freq_mhz_applied": row.freq_mhz,
        "tcmalloc_applied": row.tcmalloc,
        "retention_state_applied": row.retention_state,
        "knobs_applied": "; ".join(f"{name}={value}" for name, value in row.knobs),
        "not_applied": "; ".join(row.not_applied),
        "status": row.status,
        "reason": row.reason,
        "iterations": row.iterations,
        "node_used_bytes": row.node_used_bytes,
        "rss_max_bytes_per_rank": row.rss_max_bytes,
        "seconds_per_iteration": row.seconds_per_iteration,
        "tokens_per_second": row.tokens_per_second,
        "tflops_per_node_notes": row.tflops_notes,
        "tflops_per_node_exact": row.tflops_exact,
        "formula_notes": row.formula_notes,
        "formula_exact": row.formula_exact,
        "first_loss": row.first_loss,
        "last_loss": row.last_loss,
        "first_validation_loss": row.first_validation_loss,
        "last_validation_loss": row.last_validation_loss,
        "energy_joules_all_nodes": row.energy_joules,
        "watts_per_node": row.watts_per_node,
        "joules_per_iteration": row.joules_per_iteration,
        "joules_per_token": row.joules_per_token,
        "energy": row.energy_basis,
        "formula_energy": ENERGY_FORMULA,
        "trainer": row.trainer or OURS,
        "git_commit": row.git_commit,
        "date": row.date,
        "job_id": row.job_id,
        "remarks": "; ".join(row.remarks),
        "attempts": row.attempts,
        "sweep": row.sweep,
        "config_digest": row.digest,
        "runs": " ".join(row.runs),
        **(_grid_values(row) if row.images_per_second is not None else {}),
        **({"evaluation_losses": _evaluations_text(row)} if row.evaluations else {}),
    }


def _grid_values(row: ResultRow) -> Dict[str, Any]:
    return {
        "images_per_second": row.images_per_second,
        "last_validation_accuracy": row.last_validation_accuracy,
        "compile_seconds": row.compile_seconds,
    }


def _evaluations_text(row: ResultRow) -> str:
    return "; ".join(f"{name}: {first:.6f} to {last:.6f}" for name, first, last in row.evaluations)


def _median(values: Iterable[Optional[float]]) -> Optional[float]:
    present: List[float] = [value for value in values if value is not None]
    return statistics.median(present) if present else None
