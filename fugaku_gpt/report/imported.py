"""Imports logs of other trainers into a directory that tables treat like a run's: ``imported.json``, ``metrics.jsonl``.

The values stated by the log and its block of arguments are stored with those that the user adds; all others stay
unknown. Only products and quotients of stated numbers (nodes = ranks / ranks per node) are derived. TFLOPs are computed
by our formulas, and compared with the log's claim.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.records.files import write_json_atomically, write_text_atomically
from fugaku_gpt.records.run import FAILED, OK, OUT_OF_MEMORY, RunDirectory
from fugaku_gpt.records.summary import WARMUP_SAMPLES
from fugaku_gpt.records.sweep import digest_of
from fugaku_gpt.report.catalogue import size_label
from fugaku_gpt.report.logged_run import IN_ROWS, OTHER_MODELS, LoggedRun, complete_settings, model_of
from fugaku_gpt.report.notes_table import NO_VALUE
from fugaku_gpt.report.rows import FROM_LOG, UNFINISHED, ResultRow
from fugaku_gpt.report.trainer_logs import NORMS, Log, read_log_files
from fugaku_gpt.typed_json import record_of, value_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
FILE = "imported.json"
PLAIN_GPT = "TFLOPs as of a plain GPT, but"  # the first words of the remark on another model
_ROUNDING = 0.0051  # of a claim: logs print two decimals
_SAME = 0.01  # share by which a claimed speed may differ from ours before it is worth a remark


def import_logs(logs: Sequence[Path], out: Path, given: LoggedRun, overwrite: bool = False) -> ResultRow:
    """Read logs, leave ``imported.json`` and ``metrics.jsonl`` in ``out``, and return the row.

    Args:
        given: settings by the user; they override those of the logs.
        overwrite: whether to replace figures that a run of ours has left there.

    Raises:
        UsageError: a log cannot be read or has no iteration line, or ``out`` holds a run of ours.
    """
    log = read_log_files(logs)
    if not log.iterations:
        raise UsageError(
            f"{', '.join(map(str, logs))}: no iteration line in it, ours, Megatron's, GPT-NeoX's or NeMo's"
        )
    directory = RunDirectory(out)
    if not overwrite and not is_imported(out) and (directory.metrics_file.exists() or directory.config_file.exists()):
        raise UsageError(f"{out}: already holds a run; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(directory.metrics_file, metrics_text(log))
        write_json_atomically(
            out / FILE,
            {
                "version": VERSION,
                "trainer": log.trainer,
                "logs": [str(path.absolute()) for path in logs],
                "given": {key: value for key, value in asdict(given).items() if value is not None},
                "arguments": dict(log.arguments),
                "iterations_planned": log.total,
                "torn_lines": log.torn,
                "unread_lines": log.unread,
                "unknown_fields": dict(log.unknown_fields),
                "error": log.error,
                "repeated_lines": log.repeated,
                "imported": time.time(),
            },
        )
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None
    return imported_row(out)


def metrics_text(log: Log) -> str:
    """``metrics.jsonl`` of a log."""
    lines = [{"kind": "iteration", **line} for line in log.iterations]
    lines += [{"kind": "validation", **line} for line in log.validations]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def is_imported(path: Path) -> bool:
    """True if a directory holds the files of :func:`import_logs`."""
    return (path / FILE).is_file()


def read_imported(path: Path) -> Dict[str, Any]:
    """Read the file that :func:`import_logs` has written.

    Raises:
        UsageError: the file is not of this format.
    """
    values = read_versioned_json(path / FILE, "an imported log", (VERSION,), _checked, mend="import it again")
    if values is None:
        raise UsageError(f"{path / FILE}: no such file; import the log again")
    return values


def _checked(values: Dict[str, Any]) -> Dict[str, Any]:
    """Return the values after checking that they have the keys that readers of an imported log need."""
    given = asdict(record_of(LoggedRun, values["given"]))
    kinds = {
        "trainer": str, "logs": Tuple[str, ...], "arguments": Dict[str, str], "iterations_planned": Optional[int],
        "torn_lines": Optional[int], "unread_lines": Optional[int], "unknown_fields": Optional[Dict[str, int]],
        "error": Optional[str], "repeated_lines": Optional[int],
    }  # fmt: skip
    optional = ("iterations_planned", "torn_lines", "unread_lines", "unknown_fields", "error", "repeated_lines")
    for name, kind in kinds.items():
        value_of(kind, values.get(name) if name in optional else values[name], name)
    return {**values, "given": {key: value for key, value in given.items() if value is not None}}


def imported_row(path: Path) -> ResultRow:
    """The row of an imported log.

    Raises:
        UsageError: a file in it is damaged.
    """
    values = read_imported(path)
    lines = RunDirectory(path).metrics("iteration")
    validations = [line["loss"] for line in RunDirectory(path).metrics("validation") if line.get("loss") is not None]
    run = complete_settings(values["arguments"], LoggedRun(**values["given"]), lines)
    remarks: List[str] = [f"{FROM_LOG} {values['trainer']}"]
    times = [line["seconds"] for line in after_warmup(lines, "seconds")]
    seconds = statistics.median(times) if times else None
    model, padded = model_of(run), run.padded_vocab
    notes = exact = None
    if model is not None and padded and run.global_batch and seconds and run.nodes:
        exact = tflops_per_node(exact_flops(model, run.global_batch, padded), seconds, run.nodes)
        if run.recompute is not None:
            flops = notes_flops(model, run.global_batch, padded, run.recompute)
            notes = tflops_per_node(flops, seconds, run.nodes)
    remarks += _claim_remarks(run, lines, notes, values["trainer"])
    model_differences = [
        name for name in OTHER_MODELS if values["arguments"].get(name, "False") not in ("False", "None", "0")
    ]
    if model_differences:
        remarks.append(f"{PLAIN_GPT} {' '.join(model_differences)}")
    remarks += _not_finite(lines)
    for key, what in (("torn_lines", "torn lines left out"), ("unread_lines", "lines not understood")):
        if values.get(key):
            remarks.append(f"{values[key]} {what}")
    done = lines[-1]["iteration"] if lines else 0
    status, reason = _status_of(run, done, values)
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    tokens = run.global_batch * run.seq_len / seconds if run.global_batch and run.seq_len and seconds else None
    return ResultRow(
        size=run.name or (size_label(model) or size_name(model) if model is not None and run.vocab_size else NO_VALUE),
        seq_len=run.seq_len,
        nodes=run.nodes,
        dp=run.dp,
        tp=run.tp,
        pp=run.pp,
        micro_batch=run.micro_batch,
        global_batch=run.global_batch,
        ranks_per_node=run.ranks_per_node or 1,
        recompute=bool(run.recompute),
        torch=run.torch or "",
        dtype=run.dtype or "",
        freq_mhz=run.freq_mhz,
        tcmalloc=bool(run.tcmalloc),
        retention_state=run.retention_state,
        seconds_per_iteration=seconds,
        tokens_per_second=tokens,
        tflops_notes=notes,
        tflops_exact=exact,
        node_used_bytes=max((line["node_used_bytes"] for line in lines if line.get("node_used_bytes")), default=None),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        first_validation_loss=validations[0] if validations else None,
        last_validation_loss=validations[-1] if validations else None,
        iterations=done,
        status=status,
        reason=reason,
        date=run.date or "",
        job_id=run.job_id or "",
        remarks=tuple(remarks),
        digest=digest_of(json.dumps([asdict(run), values["trainer"]], sort_keys=True)),
        runs=(str(path),),
        trainer=values["trainer"],
        layers=run.layers,
        hidden=run.hidden,
        heads=run.heads,
    )


def after_warmup(lines: Sequence[Mapping[str, Any]], key: str) -> List[Mapping[str, Any]]:
    """The lines that state ``key``, without those that begin in the first ``WARMUP_SAMPLES`` iterations of the run; all
    of them if there are no others. A log that begins later, or logs each tenth iteration, loses no line more."""
    numbers = [line["iteration"] for line in lines]
    interval = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    begins = dict(zip(numbers, [numbers[0] - interval, *numbers[:-1]])) if numbers else {}
    stating = [line for line in lines if line.get(key)]
    return [line for line in stating if begins[line["iteration"]] >= WARMUP_SAMPLES] or stating


def understood(path: Path) -> str:
    """Count what was read of an imported log, and what was not understood.

    Raises:
        UsageError: a file in it is damaged.
    """
    values, directory = read_imported(path), RunDirectory(path)
    iterations, validations = len(directory.metrics("iteration")), len(directory.metrics("validation"))
    unread = int(values.get("torn_lines") or 0) + int(values.get("unread_lines") or 0)
    fields = values.get("unknown_fields") or {}
    text = f"iteration lines: {iterations}, validations: {validations}, lines with figures not understood: {unread}"
    repeated = values.get("repeated_lines")
    text += f", lines that a later one of the same iteration replaces: {repeated}" if repeated else ""
    return text + "".join(f", field '{name}' not understood: {count}" for name, count in fields.items())


def unknown_settings(path: Path) -> List[str]:
    """The settings that neither the log nor the user has given, of those that a row shows or its TFLOPs follow from.

    Raises:
        UsageError: a file in it is damaged.
    """
    values = read_imported(path)
    lines = RunDirectory(path).metrics("iteration")
    run = complete_settings(values["arguments"], LoggedRun(**values["given"]), lines)
    return [name for name in IN_ROWS if getattr(run, name) is None]


def _not_finite(lines: Sequence[Mapping[str, Any]]) -> List[str]:
    """Remarks on losses and norms that were nan or infinite."""
    remarks = []
    for key, name in NORMS.items():
        stated = [line for line in lines if key in line]
        count = sum(line[key] is None for line in stated)
        if count:
            remarks.append(f"{name} not finite in {count} of {len(stated)} lines")
    return remarks


def _claim_remarks(
    run: LoggedRun, lines: Sequence[Mapping[str, Any]], notes: Optional[float], trainer: str
) -> Tuple[str, ...]:
    """A remark if the log claims another speed than the formula gives; claims are per rank."""
    claims = [line["tflops_logged"] for line in after_warmup(lines, "tflops_logged")]
    if not claims:
        return ()
    claim = statistics.median(claims)
    if notes is None or not run.ranks or not run.nodes:
        return (f"the log claims {claim:g} TFLOPs per rank",)
    share = claim * run.ranks / run.nodes / notes
    if abs(share - 1) <= max(_SAME, _ROUNDING * share / claim):
        return ()
    return (f"the log claims {claim:g} TFLOPs per rank: {share:.2f} times the formula",)


def _status_of(run: LoggedRun, done: int, values: Mapping[str, Any]) -> Tuple[str, str]:
    planned, error = values.get("iterations_planned"), str(values.get("error") or "")
    if run.status is not None:
        return run.status, ""
    if planned is not None and done >= planned:
        return OK, ""
    if "out of memory" in error.lower() or "MemoryError" in error:
        return OUT_OF_MEMORY, error
    return (FAILED, error) if error else (UNFINISHED, "")
