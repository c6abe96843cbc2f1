"""Compares recorded runs: rows of a CSV, or run directories, matched by configuration.

The runs of a comparison should differ in the compared settings and in nothing else. So the runs of A and B are matched
by all their other settings, and each matched configuration is a block (as in a randomised block design) that gives one
ratio, between the geometric means of its runs. Runs without a partner are reported and left out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from fugaku_gpt.compare.samples import JobSample, read_job, require_run_directories, unapplied_settings
from fugaku_gpt.compare.sides import RecordedSide, refuse_unequal_work, work_per_iteration
from fugaku_gpt.compare.statistics import Comparison, compare_groups, compare_pairs
from fugaku_gpt.config import RunConfig, changed_settings
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.input_files import resolved
from fugaku_gpt.planner.tables.rows import ConfigRow, RefusedRow, parse_measurement, parse_row, read_table, torch_series

# columns that are no configuration: one table rounds the vocabulary that another gives in full
_NON_CONFIGURATION_COLUMNS = ("id", "vocab", "mem_unit", "dtype")
# settings of a run that do not change how long an iteration takes
_WORK_COLUMNS = ("layers", "hidden", "heads", "seq_len", "global_batch")
_HANDLING_KEYS = (
    *("job.", "checkpoint.", "data.", "training.iterations", "training.profile_operators", "training.tensorboard"),
)


@dataclass(frozen=True)
class RecordedRun:
    """One recorded run: its configuration, its measurements, and the settings that were not applied.

    Attributes:
        key: unique key: its directory, or its table and number of the row; names may recur.
        name: name for messages.
        work: settings that determine the work of an iteration.
        configuration: settings by which runs are matched.
        summary: short text of the configuration.
        seconds: seconds per iteration.
        memory: peak memory, in ``memory_unit``; None where it is unknown.
        not_applied: keys of settings that were not applied.
    """

    key: str
    name: str
    work: Mapping[str, object]
    configuration: Mapping[str, object]
    summary: str
    seconds: float
    memory: Optional[float] = None
    memory_unit: str = ""
    not_applied: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One configuration that both sides have: a block, as in a randomised block design.

    Attributes:
        summary: short text of the configuration.
        a, b: the runs of each side, at least one.
        comparison: comparison of these runs; None where a side has a single run, since the variation between repeats
            is then unknown.
    """

    summary: str
    a: Tuple[RecordedRun, ...]
    b: Tuple[RecordedRun, ...]
    comparison: Optional[Comparison]

    @property
    def seconds(self) -> Tuple[float, float]:
        """Geometric means of the sides' seconds per iteration."""
        return _geometric_mean([run.seconds for run in self.a]), _geometric_mean([run.seconds for run in self.b])

    @property
    def ratio(self) -> float:
        """Seconds per iteration of B over those of A."""
        a, b = self.seconds
        return b / a

    @property
    def memory_ratio(self) -> Optional[float]:
        """Memory of B over that of A; None without readings of the same kind on both sides."""
        if len({run.memory_unit for run in (*self.a, *self.b)}) != 1:
            return None
        a, b = ([run.memory for run in runs if run.memory is not None] for runs in (self.a, self.b))
        return max(b) / max(a) if a and b else None


@dataclass(frozen=True)
class Recorded:
    """Two sides of recorded runs.

    Attributes:
        blocks: the configurations that both sides have.
        comparison: comparison over all blocks; None where there are none.
        left_out: lines about runs that were not used, for each side.
        jobs_a, jobs_b: the run directories that were used; empty for rows of a table.
    """

    blocks: Tuple[Block, ...]
    comparison: Optional[Comparison]
    left_out: Tuple[str, ...]
    jobs_a: Tuple[JobSample, ...] = ()
    jobs_b: Tuple[JobSample, ...] = ()


@dataclass(frozen=True)
class SelectedRuns:
    """The runs of a side that meet its conditions, and lines about runs that were not used.

    Attributes:
        jobs: the run directories of ``runs``, in the same order; empty for rows of a table.
        failed: lines about how runs ended that meet the conditions and failed.
    """

    runs: Tuple[RecordedRun, ...]
    left_out: Tuple[str, ...]
    jobs: Tuple[JobSample, ...] = ()
    failed: Tuple[str, ...] = ()


def compare_recorded(a: RecordedSide, b: RecordedSide, warm_up: int, tolerance: float) -> Recorded:
    """Matches the runs of both sides and compares them.

    Args:
        warm_up: number of iterations at the beginning of each run directory that do not count.
        tolerance: share within which a ratio counts as the same.

    Raises:
        UsageError: a side has no run, the sides share runs, or their iterations do not do the same work.
        RunFailed: all runs of a side have failed.
    """
    if a.is_table != b.is_table:
        raise UsageError(f"{a.text} and {b.text}: rows of a table and run directories have no columns in common")
    if (resolved(a.path), a.conditions) == (resolved(b.path), b.conditions):
        raise UsageError(f"{a.text} and {b.text}: are the same runs; add what tells them apart, such as :torch=1.7")
    selected_a, selected_b = (select_rows(side) if side.is_table else select_runs(side, warm_up) for side in (a, b))
    _refuse_overlap(a, b, selected_a, selected_b)
    compared_keys = {condition.key for condition in set(a.conditions) ^ set(b.conditions)}
    if compared_keys & {"nodes", "ranks_per_node", "ranks"}:  # with these the number of replicas changes
        compared_keys |= {"processes", "dp", "layout.dp"}
    matched_runs = _match(selected_a.runs, selected_b.runs, compared_keys)
    if (
        not matched_runs
        and not a.is_table
        and all(
            len(_group_by_configuration(selected.runs, compared_keys)) == 1 for selected in (selected_a, selected_b)
        )
    ):
        # two folders with one configuration each: their differences are intended
        matched_runs = [(selected_a.runs, selected_b.runs)]
    for runs_a, runs_b in matched_runs:
        refuse_unequal_work(runs_a[0].work, runs_b[0].work)
    applied = [(_applied_runs(runs_a, runs_b), _applied_runs(runs_b, runs_a)) for runs_a, runs_b in matched_runs]
    blocks = tuple(
        Block(runs_a[0].summary, runs_a, runs_b, _compare_runs(runs_a, runs_b, tolerance))
        for runs_a, runs_b in applied
        if runs_a and runs_b
    )
    used_a, used_b = ({run.key for runs in side for run in runs} for side in _runs_of_sides(blocks))
    return Recorded(
        blocks,
        _compare_blocks(blocks, tolerance),
        tuple(
            f"{name}: {line}"
            for name, selected, used_keys in (("A", selected_a, used_a), ("B", selected_b, used_b))
            for line in (
                *selected.left_out,
                *_unapplied_lines(selected.runs, used_keys),
                *_unmatched_lines(selected.runs, used_keys),
            )
        ),
        _used_jobs(selected_a, used_a),
        _used_jobs(selected_b, used_b),
    )


def _refuse_overlap(a: RecordedSide, b: RecordedSide, selected_a: "SelectedRuns", selected_b: "SelectedRuns") -> None:
    keys_b = {run.key for run in selected_b.runs}
    shared_names = [run.name for run in selected_a.runs if run.key in keys_b]
    if shared_names:
        raise UsageError(
            f"{a.text} and {b.text}: {_shortened_list(shared_names)} on both sides: are the same runs there; "
            "add conditions that tell the sides apart, such as :torch=1.7 and :torch=1.10"
        )


def _runs_of_sides(blocks: Sequence[Block]) -> "Tuple[List[Runs], List[Runs]]":
    return [block.a for block in blocks], [block.b for block in blocks]


def _used_jobs(selected: "SelectedRuns", used_keys: Set[str]) -> Tuple[JobSample, ...]:
    return tuple(job for run, job in zip(selected.runs, selected.jobs) if run.key in used_keys)


def _compare_blocks(blocks: Sequence[Block], tolerance: float) -> Optional[Comparison]:
    if not blocks:
        return None
    if len(blocks) == 1:
        (block,) = blocks
        a, b = ([run.seconds for run in runs] for runs in (block.a, block.b))
        return compare_groups(a, b, tolerance)
    seconds = [block.seconds for block in blocks]
    return compare_pairs([seconds_a for seconds_a, _ in seconds], [seconds_b for _, seconds_b in seconds], tolerance)


def _compare_runs(a: Sequence[RecordedRun], b: Sequence[RecordedRun], tolerance: float) -> Optional[Comparison]:
    if min(len(a), len(b)) < 2:
        return None
    return compare_groups([run.seconds for run in a], [run.seconds for run in b], tolerance)


Runs = Tuple[RecordedRun, ...]


def _match(a: Sequence[RecordedRun], b: Sequence[RecordedRun], compared_keys: Set[str]) -> List[Tuple[Runs, Runs]]:
    groups_a, groups_b = _group_by_configuration(a, compared_keys), _group_by_configuration(b, compared_keys)
    return [(tuple(groups_a[key]), tuple(groups_b[key])) for key in groups_a if key in groups_b]


def _group_by_configuration(
    runs: Sequence[RecordedRun], compared_keys: Set[str]
) -> Dict[Tuple[Tuple[str, str], ...], List[RecordedRun]]:
    groups: Dict[Tuple[Tuple[str, str], ...], List[RecordedRun]] = {}
    for run in runs:
        key = tuple(
            sorted((name, repr(value)) for name, value in run.configuration.items() if name not in compared_keys)
        )
        groups.setdefault(key, []).append(run)
    return groups


def _applied_runs(runs: Runs, other_runs: Runs) -> Runs:
    """The runs that really ran with the settings that distinguish the sides.

    A setting that both sides ask for and that was applied in no run of either side does not distinguish them.
    """
    other_configuration = other_runs[0].configuration
    unapplied_everywhere = set.intersection(*(set(run.not_applied) for run in (*runs, *other_runs)))
    return tuple(
        run
        for run in runs
        if all(
            key in unapplied_everywhere and run.configuration.get(key) == other_configuration.get(key)
            for key in run.not_applied
        )
    )


def _unapplied_lines(runs: Sequence[RecordedRun], used_keys: Set[str]) -> List[str]:
    unapplied_runs = [run for run in runs if run.key not in used_keys and run.not_applied]
    return [f"{run.name}: {', '.join(run.not_applied)} was not applied, by its own record" for run in unapplied_runs]


def _unmatched_lines(runs: Sequence[RecordedRun], used_keys: Set[str]) -> List[str]:
    unmatched = [run.name for run in runs if run.key not in used_keys and not run.not_applied]
    if not unmatched:
        return []
    noun = "run" if len(unmatched) == 1 else "runs"
    return [f"{len(unmatched)} {noun} of configurations that the other side lacks: {_shortened_list(unmatched)}"]


def _shortened_list(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def select_rows(side: RecordedSide) -> SelectedRuns:
    """Selects the rows of a CSV that meet a side's conditions and have status ok.

    Raises:
        UsageError: there is no such row.
    """
    selected: List[RecordedRun] = []
    left_out_counts: Counter[str] = Counter()
    first_shown: Dict[Tuple[object, ...], Tuple[str, Optional[float]]] = {}  # → first table that shows the row, memory
    file = str(resolved(side.path))
    for number, cells in enumerate(read_table(side.path)):
        row = parse_row(cells)
        if not all(condition.is_met_by(_cell_value(row, cells, condition.key)) for condition in side.conditions):
            continue
        if isinstance(row, RefusedRow):
            left_out_counts["which are no configuration"] += 1
            continue
        measurement = parse_measurement(cells)
        if measurement.status.lower() != "ok" or measurement.seconds is None:
            left_out_counts[
                f"with status {measurement.status or 'unknown'}" if measurement.status != "ok" else "without seconds"
            ] += 1
            continue
        configuration = {
            spec.name: getattr(row, spec.name) for spec in fields(row) if spec.name not in _NON_CONFIGURATION_COLUMNS
        }
        # a repeat in the same table may have equal seconds, to the given digits, but not equal memory, too
        identity, table = (*configuration.values(), measurement.seconds), row.id.rpartition(".")[0]
        shown = first_shown.get(identity)
        if shown is not None and (
            shown[0] != table or measurement.memory is not None and shown[1] == measurement.memory
        ):
            left_out_counts["that another table shows too: counted once"] += 1
            continue
        first_shown.setdefault(identity, (table, measurement.memory))
        selected.append(
            RecordedRun(
                f"{file}:{number}",
                row.id,
                {name: configuration[name] for name in _WORK_COLUMNS},
                configuration,
                _row_summary(row),
                measurement.seconds,
                measurement.memory,
                row.mem_unit,
            )
        )
    if not selected:
        raise UsageError(f"{side.text}: no row with status ok and seconds meets this; see its columns and conditions")
    return SelectedRuns(tuple(selected), _left_out_lines(left_out_counts, "row"))


def source_of(name: str) -> str:
    """The notes that a row comes from: its name up to the first point; empty where the name has no point."""
    source, point, _ = name.partition(".")
    return source if point else ""


def select_runs(side: RecordedSide, warm_up: int) -> SelectedRuns:
    """Selects the run directories that meet a side's conditions and ended well.

    Raises:
        UsageError: there is no such run.
        RunFailed: all that meet the conditions have failed.
    """
    selected: List[RecordedRun] = []
    jobs: List[JobSample] = []
    failed: List[str] = []
    left_out_counts: Counter[str] = Counter()
    for directory in require_run_directories(side.path):
        job = read_job(directory, warm_up)
        config = job.config
        if config is None:
            left_out_counts["that were refused"] += 1
            continue
        if not all(condition.is_met_by(_setting_value(config, condition.key)) for condition in side.conditions):
            continue
        if not job.is_usable or job.seconds is None:
            left_out_counts[
                f"with status {job.status}" if job.status != "ok" else "of no more iterations than the warm-up"
            ] += 1
            failed += [f"{job.name}: {job.status}: {job.reason}"] if job.status != "ok" else []
            continue
        configuration = {
            key: value for key, value in changed_settings(config).items() if not key.startswith(_HANDLING_KEYS)
        }
        # the default of a condition's key counts, so that "not set" and "false" are the same
        configuration.update({condition.key: _setting_value(config, condition.key) for condition in side.conditions})
        memory = float(job.node_used_bytes) if job.node_used_bytes is not None else None
        summary, unapplied = _config_summary(config), tuple(unapplied_settings(job))
        key, work, unit = str(resolved(directory)), work_per_iteration(config), "bytes of the node"
        selected.append(RecordedRun(key, job.name, work, configuration, summary, job.seconds, memory, unit, unapplied))
        jobs.append(job)
    if not selected:
        left_out = "; ".join(_left_out_lines(left_out_counts, "run"))
        message = f"{side.text}: no run that has ended well and meets this" + (f" ({left_out})" if left_out else "")
        raise RunFailed("\n".join([message, *failed])) if failed else UsageError(message)
    return SelectedRuns(tuple(selected), _left_out_lines(left_out_counts, "run"), tuple(jobs), tuple(failed))


def _left_out_lines(left_out_counts: Mapping[str, int], noun: str) -> Tuple[str, ...]:
    return tuple(
        f"{count} {noun}{'' if count == 1 else 's'} {reason}" for reason, count in sorted(left_out_counts.items())
    )


def _cell_value(row: "ConfigRow | RefusedRow", cells: Mapping[str, str], key: str) -> object:
    """The value of a row for a condition; the text of the cell where the row is no valid configuration."""
    if isinstance(row, ConfigRow):
        return getattr(row, key)
    return torch_series(cells.get(key, "")) if key == "torch" else cells.get(key, "")


def _setting_value(config: RunConfig, key: str) -> object:
    if key == "ranks":
        return config.layout.ranks
    section, _, leaf = key.partition(".")
    return getattr(getattr(config, section), leaf)


def _row_summary(row: ConfigRow) -> str:
    shape = [
        f"{row.layers}x{row.hidden}",
        f"seq {row.seq_len}",
        f"{row.nodes} x {row.ranks_per_node}",
        f"dp {row.dp} tp {row.tp} pp {row.pp}",
        f"mbs {row.micro_batch} gbs {row.global_batch}",
    ]
    extras: Sequence[Tuple[bool, str]] = (
        (row.recompute, "recompute"),
        (row.zero > 0, f"zero {row.zero}"),
        (row.freq_ghz not in (0, 2.0), f"{row.freq_ghz:g} GHz"),
        (row.tcmalloc, "tcmalloc"),
        (row.retention is not None, f"retention {row.retention}"),
    )
    return ", ".join([*shape, *(text for is_shown, text in extras if is_shown)])


def _config_summary(config: RunConfig) -> str:
    layout, training = config.layout, config.training
    return ", ".join(
        [
            size_name(config.model),
            f"seq {config.model.seq_len}",
            f"dp {layout.dp} tp {layout.tp} pp {layout.pp}",
            f"mbs {training.micro_batch} gbs {training.global_batch}",
        ]
    )


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
