"""Parses logs again: restores figures lost with ``metrics.jsonl``, and turns other trainers' logs into rows."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import open_file
from fugaku_gpt.jobs.schedulers.registry import scheduler_named
from fugaku_gpt.layout.batch import iteration_sizes
from fugaku_gpt.records.files import write_bytes_atomically, write_text_atomically
from fugaku_gpt.records.job import read_history
from fugaku_gpt.records.metrics import RESUMED, read_sound_lines, without_superseded
from fugaku_gpt.records.run import Result, RunDirectory
from fugaku_gpt.records.summary import summarise
from fugaku_gpt.report.collect import locate_job, run_job_id, sub_runs
from fugaku_gpt.report.imported import import_logs, is_imported, read_imported
from fugaku_gpt.report.logged_run import LoggedRun
from fugaku_gpt.report.trainer_logs import OURS, Log, read_log_files

DAMAGED = "metrics.jsonl.damaged"  # copy of the file that reparse has replaced, if some of its lines were damaged
_LOGS = ("log.txt", "*.out", "*.err", "*.log", "output.*/*/*/stdout.*", "output.*/stdout.*")


@dataclass(frozen=True)
class Reparsed:
    """Outcome of parsing the logs of one run again.

    Attributes:
        trainer: the trainer that wrote the iteration lines; empty if there are none.
        lines: number of iteration lines that were read.
        added: number of these that were not recorded before.
        notes: remarks, one line each.
    """

    directory: Path
    trainer: str
    lines: int
    added: int
    notes: Tuple[str, ...] = ()


def logs_of(directory: Path) -> List[Path]:
    """List the logs of a run directory: the output of its jobs, then other files that look like logs, oldest first."""
    logs: Dict[Path, None] = {}
    job_directory, sub = locate_job(directory)
    for job in read_history(job_directory).jobs:
        if sub is not None and not job.bulk:  # it printed nothing for this sub-job
            continue
        files = scheduler_named(job.scheduler).output_files(job_directory, run_job_id(job, sub))
        logs.update((path, None) for path in files)
    for pattern in _LOGS:
        logs.update((path, None) for path in sorted(directory.glob(pattern), key=_by_numbers))
    return [path for path in logs if path.is_file()]


def reparse(directory: Path, given: Optional[LoggedRun] = None) -> Reparsed:
    """Parse the logs of a directory again.

    For a run of ours, iterations that only the log has are added to ``metrics.jsonl``; its own lines stay, since their
    figures have more digits. Another trainer's lines are imported.

    Raises:
        UsageError: there is no log, or a file of the run is damaged.
    """
    runs = sub_runs(directory)
    if runs:
        sub_runs_read = [reparse(run, given) for run in runs if logs_of(run)]
        notes = tuple(f"{sub_run.directory.name}: {note}" for sub_run in sub_runs_read for note in sub_run.notes)
        lines, added = (sum(getattr(sub_run, name) for sub_run in sub_runs_read) for name in ("lines", "added"))
        return Reparsed(directory, sub_runs_read[0].trainer if sub_runs_read else "", lines, added, notes)
    logs = logs_of(directory)
    if not logs and is_imported(directory):
        logs = [Path(name) for name in read_imported(directory)["logs"]]
    if not logs:
        raise UsageError(f"{directory}: holds no log (log.txt, *.out, *.log, output.<job>/...)")
    log = read_log_files(logs)
    torn = (f"{log.torn} torn iteration lines left out",) if log.torn else ()
    if not log.iterations:
        return Reparsed(directory, "", 0, 0, ("no iteration line in " + ", ".join(path.name for path in logs),))
    if log.trainer == OURS and (directory / "config.yaml").exists():
        added, notes = _restore(directory, log)
        return Reparsed(directory, log.trainer, len(log.iterations), added, torn + notes)
    before = _count(directory)
    import_logs(logs, directory, _settings(directory, given), overwrite=True)
    return Reparsed(directory, log.trainer, len(log.iterations), max(0, len(log.iterations) - before), torn)


def _settings(directory: Path, given: Optional[LoggedRun]) -> LoggedRun:
    """Merge settings: the user's override those of the last import, which override the run's configured nodes."""
    settings: Dict[str, Any] = {}
    if (directory / "config.yaml").exists():
        config = load_run_config(directory / "config.yaml")
        settings.update(nodes=config.job.nodes)  # the job's; the rest is the other trainer's own affair
    if is_imported(directory):
        settings.update(read_imported(directory)["given"])
    if given is not None:
        settings.update((key, value) for key, value in vars(given).items() if value is not None)
    return LoggedRun(**settings)


def _count(directory: Path) -> int:
    try:
        return len(RunDirectory(directory).metrics("iteration"))
    except UsageError:
        return 0


def _restore(directory: Path, log: Log) -> Tuple[int, Tuple[str, ...]]:
    record = RunDirectory(directory)
    lines, damaged = read_sound_lines(record.metrics_file)
    lines = without_superseded(lines)
    recorded = {(line.get("kind"), line.get("iteration")) for line in lines}
    # the log of a resumed run also has later iterations, which are to be done again
    is_resumed = any(line.get("kind") == RESUMED for line in lines)
    limit = max((line.get("iteration") or 0 for line in lines), default=0) if is_resumed else math.inf
    config = load_run_config(record.config_file)
    missing = [
        {"kind": "iteration", **line}
        for line in _with_sizes(config, log.iterations)
        if ("iteration", line["iteration"]) not in recorded and line.get("seconds") is not None
    ]
    missing += [
        {"kind": "validation", **line} for line in log.validations if ("validation", line["iteration"]) not in recorded
    ]
    missing = [line for line in missing if line["iteration"] <= limit]
    notes: List[str] = []
    if missing or damaged:
        if damaged:
            with open_file(record.metrics_file) as stream:
                write_bytes_atomically(directory / DAMAGED, stream.read())
            notes.append(f"{damaged} damaged lines of metrics.jsonl left out; a copy is in {DAMAGED}")
        merged = sorted([*lines, *missing], key=lambda line: line.get("iteration") or 0)
        text = "".join(json.dumps(_complete(line), allow_nan=False) + "\n" for line in merged)
        write_text_atomically(record.metrics_file, text)
    result = record.result()
    iterations = record.metrics("iteration")
    if result is not None and iterations:
        summary = summarise(config, iterations, record.metrics("validation"))
        updated = Result(**{**vars(result), "summary": summary, "iterations": iterations[-1]["iteration"]})
        if updated != result:
            record.write_result(updated)
            notes.append("summary of result.json computed again")
    return sum(line["kind"] == "iteration" for line in missing), tuple(notes)


def _with_sizes(config: RunConfig, lines: Sequence[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
    """Add the batch to lines without one, and the sample length if that grows: our short lines state neither."""
    lengths_vary = config.training.seq_ramp_start is not None
    sizes = enumerate(iteration_sizes(config), start=1)
    for line in lines:
        size = next((size for iteration, size in sizes if iteration == line["iteration"]), None)
        if size is not None and "global_batch" not in line:
            line = {"global_batch": size[0], **({"actual_seq_len": size[1]} if lengths_vary else {}), **line}
        yield line


def _complete(line: Dict[str, Any]) -> Dict[str, Any]:
    """Add the keys that readers rely on to a line."""
    return {"loss": None, **line} if line.get("kind") == "iteration" else line


def _by_numbers(path: Path) -> Tuple[Any, ...]:
    """Sort key that puts ``stdout.1.10`` after ``stdout.1.9``."""
    return tuple(int(part) if part.isdecimal() else 0 for part in re.split(r"(\d{1,18})", str(path))[1::2]), str(path)
