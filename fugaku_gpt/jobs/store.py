"""The run store: every run directory under a folder, as records that can be listed, filtered and sorted.

The directories are the source of truth. Listing walks them, compares the times of their few files, and reads again only
what has changed since the last time (see :mod:`fugaku_gpt.records.index`); a run that has not ended is always read
again. No lock is taken, and a directory that is half-written, damaged or just being moved does not make listing fail:
the run's ``problem`` reports it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from fugaku_gpt.config import readable_settings
from fugaku_gpt.config.recorded import load_recorded
from fugaku_gpt.config.tree import flatten, read_yaml_file
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.jobs.outcome import job_outcome
from fugaku_gpt.records.files import leftovers
from fugaku_gpt.records.index import (
    FILE,
    Entries,
    Fingerprint,
    file_system_time_ns,
    fingerprint_of,
    is_settled,
    read_index,
    write_index,
)
from fugaku_gpt.records.job import EXIT_DIR, JOB_FILE, read_history
from fugaku_gpt.records.run import REFUSED, RunDirectory, last_line
from fugaku_gpt.records.sweep import ATTEMPTS, read_sweep_entry

UNFINISHED = "unfinished"  # neither a result nor a job: still running, or killed
MAX_DEPTH = 4  # levels of folders below a store that are searched: a folder of stores, a sweep, attempts, a run
_FILES = ("config.yaml", "sweep.json", "environment.json", "metrics.jsonl", "result.json", JOB_FILE, EXIT_DIR)
FIGURES = (
    "seconds_per_iteration", "tokens_per_second", "tflops_notes", "tflops_exact", "node_used_bytes", "rss_max_bytes",
    "first_loss", "last_loss", "first_validation_loss", "last_validation_loss",
)  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """A summary of one run directory.

    Attributes:
        run: path below the store.
        status: one of ``records.run.STATUSES``, otherwise the state of its job, otherwise ``UNFINISHED``.
        reason: reason of the status, in one line.
        attempt: 0 for the current attempt; earlier attempts are numbered from 1.
        settings: settings that differ from their defaults, dotted key → value.
        size: size of the model as in tables; empty if the configuration is not valid.
        iterations: number of iterations done.
        figures: figures of the result's summary that are available.
        started, ended: seconds since the epoch; None if there is no result.
        job: id of the last job; empty if there is none.
        problem: what could not be read; empty if everything could.
    """

    run: str
    status: str
    reason: str = ""
    sweep: str = ""
    row: str = ""
    variant: str = ""
    repeat: int = 0
    attempt: int = 0
    digest: str = ""
    settings: Dict[str, Any] = field(default_factory=dict)
    size: str = ""
    iterations: int = 0
    figures: Dict[str, Any] = field(default_factory=dict)
    started: Optional[float] = None
    ended: Optional[float] = None
    scheduler: str = ""
    job: str = ""
    torch: str = ""
    git_commit: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Listing:
    """The contents of a store.

    Attributes:
        runs: runs in the order of their paths.
        read: number of runs that had to be read; the others came from the index.
    """

    runs: List[RunRecord]
    read: int


def list_runs(store: Path, *, use_index: bool = True) -> Listing:
    """List every run under a folder, including earlier attempts, and update the index if possible.

    Args:
        use_index: whether an existing index may be used.

    Raises:
        UsageError: there is no such folder.
    """
    if not store.is_dir():
        raise UsageError(f"{store}: no such folder; give a folder of run directories")
    started = file_system_time_ns(store)
    indexed = read_index(store) if use_index else {}
    entries: Entries = {}
    runs: List[RunRecord] = []
    read = 0
    for path, fingerprint in sorted(_walk(store, "", MAX_DEPTH)):
        record = _indexed_record(indexed, path, fingerprint)
        if record is None:
            record = read_record(store, path)
            read += 1
        if record is None:  # moved away in the meantime
            continue
        runs.append(record)
        if started is not None and _is_final(record) and is_settled(fingerprint, started):
            entries[path] = (fingerprint, vars(record))
    if started is not None and entries != indexed:
        with contextlib.suppress(OSError):  # a read-only store is listed as well
            write_index(store, entries)
    return Listing(runs, read)


def reindex(store: Path) -> Tuple[Listing, int]:
    """Discard the index and read every run; return the listing and the number of temporary files removed.

    Raises:
        UsageError: there is no such folder, or the index cannot be written there.
    """
    if not store.is_dir():
        raise UsageError(f"{store}: no such folder; give a folder of run directories")
    with contextlib.suppress(FileNotFoundError):
        _unlink(store / FILE)
    removed = 0
    listing = list_runs(store, use_index=False)
    for folder in {store, *(store / record.run for record in listing.runs)}:
        for path in leftovers(folder):
            _unlink(path)
            removed += 1
    return listing, removed


def read_record(store: Path, path: str) -> Optional[RunRecord]:
    """Read the summary of one run directory; None if it does not exist (any more)."""
    directory = RunDirectory(store / path)
    problems: List[str] = []
    settings: Dict[str, Any] = {}
    size = ""
    try:
        recorded = load_recorded(directory.config_file)
        settings, size = recorded.settings, size_name(recorded.config.model)
    except ConfigError as error:
        if not directory.path.is_dir():
            return None
        problems.append(str(error).splitlines()[0])
        settings = _settings_of_refused(directory.config_file)
    result = _read_or_report(directory.result, problems)
    if result is not None and result.status == REFUSED:
        problems = []  # its settings make no valid run, which the result records: not a problem
    environment = _read_or_report(directory.environment, problems) or {}
    entry = _read_or_report(lambda: read_sweep_entry(directory.path), problems)
    history = _read_or_report(lambda: read_history(directory.path), problems)
    last = (last_line(directory.metrics_file, "iteration") if result is None else None) or {}
    status, reason = UNFINISHED, ""
    if result is not None:
        status, reason = result.status, result.reason
    elif history is not None and (history.jobs or history.open):
        outcome = _read_or_report(lambda: job_outcome(directory.path), problems)
        if outcome is not None:
            status, reason = outcome.status or outcome.state or UNFINISHED, outcome.cause
    summary = result.summary if result is not None else {"seconds_per_iteration": last.get("seconds")}
    build = environment.get("build")
    job = history.jobs[-1] if history is not None and history.jobs else None
    return RunRecord(
        run=path,
        status=status,
        reason=reason,
        sweep=entry.sweep if entry is not None else "",
        row=entry.row if entry is not None else "",
        variant=entry.variant if entry is not None else "",
        repeat=entry.repeat if entry is not None else 0,
        attempt=_attempt(path),
        digest=entry.digest if entry is not None else "",
        settings=settings,
        size=size,
        iterations=result.iterations if result is not None else int(last.get("iteration") or 0),
        figures={name: summary[name] for name in FIGURES if summary.get(name) is not None},
        started=result.started if result is not None else None,
        ended=result.ended if result is not None else None,
        scheduler=job.scheduler if job is not None else "",
        job=job.job_id if job is not None else "",
        torch=str(build.get("torch", "")) if isinstance(build, dict) else "",
        git_commit=str(environment.get("git_commit") or ""),
        problem="; ".join(problems),
    )


def _settings_of_refused(file: Path) -> Dict[str, Any]:
    """The changed settings of a file that makes no valid run, as far as they can be read."""
    try:
        return readable_settings(dict(flatten(read_yaml_file(file))))
    except ConfigError:
        return {}


def _walk(folder: Path, path: str, depth: int) -> Iterator[Tuple[str, Fingerprint]]:
    """Yield (path below the store, fingerprint) of every run; links are not followed."""
    stats: Dict[str, os.stat_result] = {}
    below: List[str] = []
    try:
        with os.scandir(folder / path if path else folder) as children:
            for entry in children:
                if entry.name in _FILES:
                    with contextlib.suppress(FileNotFoundError):  # moved in the meantime
                        stats[entry.name] = entry.stat(follow_symlinks=False)
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
    except OSError:  # moved in the meantime, or not readable
        return
    is_run = "config.yaml" in stats
    if is_run:
        yield path or ".", fingerprint_of(stats)
    if depth == 0:
        return
    for name in below:
        # inside a run: earlier attempts of its job, and the sub-jobs of a bulk job
        if not is_run or name == ATTEMPTS or name.startswith("repeat-"):
            yield from _walk(folder, f"{path}/{name}" if path else name, depth - 1)


def _indexed_record(indexed: Entries, path: str, fingerprint: Fingerprint) -> Optional[RunRecord]:
    before, record = indexed.get(path, ({}, {}))
    if before != fingerprint or set(record) != _FIELD_NAMES:
        return None
    return RunRecord(**record)


_FIELD_NAMES = {record_field.name for record_field in fields(RunRecord)}


def _is_final(record: RunRecord) -> bool:
    """Whether the record depends on the run's files only: the state of a job comes from its scheduler."""
    return record.ended is not None and not record.problem


def _attempt(path: str) -> int:
    folders = path.split("/")
    numbers = (
        [folder for folder in folders[folders.index(ATTEMPTS) + 1 :] if folder.isdecimal()]
        if ATTEMPTS in folders
        else []
    )
    return int(numbers[0]) if numbers else 0


def _read_or_report(read: Any, problems: List[str]) -> Any:
    try:
        return read()
    except UsageError as error:
        problems.append(str(error).splitlines()[0])
        return None


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: cannot be removed: {error.strerror}") from None
