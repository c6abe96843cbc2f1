"""The run store: every run directory under a folder, as records that can be listed, filtered and sorted.

The directories are the source of truth. Listing walks them, compares the times of their few files, and reads again only
what has changed since the last time (see :mod:`fugaku_gpt.records.index`); a run that has not ended is always read
again. No lock is taken, and a directory that is half-written, damaged or just being moved does not make listing fail:
the run's ``problem`` reports it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from fugaku_gpt import __version__
from fugaku_gpt.config import RunConfig, config_values, readable_settings
from fugaku_gpt.config.recorded import load_recorded
from fugaku_gpt.config.tree import flatten, read_yaml_file
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.jobs.store_folders import FILES, find_run_folders
from fugaku_gpt.machine.garbage_collection import gc_suspended
from fugaku_gpt.records.files import leftovers, remove_file
from fugaku_gpt.records.index import FILE, LineWriter, file_system_time_ns, is_settled, read_index, write_index
from fugaku_gpt.records.job import read_history
from fugaku_gpt.records.metrics import last_line
from fugaku_gpt.records.run import REFUSED, RunDirectory
from fugaku_gpt.records.sweep import ATTEMPTS, read_sweep_entry
from fugaku_gpt.typed_json import LATEST

UNFINISHED = "unfinished"  # neither a result nor a job: still running, or killed
FIGURES = (
    "seconds_per_iteration", "tokens_per_second", "tflops_notes", "tflops_exact", "node_used_bytes", "rss_max_bytes",
    "first_loss", "last_loss", "first_validation_loss", "last_validation_loss", "images_per_second",
    "last_validation_accuracy",
)  # fmt: skip


class RunRecord(NamedTuple):
    """A summary of one run directory, which nobody may change: runs share their settings.

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
    settings: Dict[str, Any] = {}
    size: str = ""
    iterations: int = 0
    figures: Dict[str, Any] = {}
    started: Optional[float] = None
    ended: Optional[float] = None
    scheduler: str = ""
    job: str = ""
    torch: str = ""
    git_commit: str = ""
    problem: str = ""


class Listing(NamedTuple):
    """The contents of a store.

    Attributes:
        runs: runs in the order of their paths.
        read: number of runs that had to be read; the others came from the index.
    """

    runs: List[RunRecord]
    read: int


def list_runs(store: Path, *, use_index: bool = True, is_read_only: bool = False) -> Listing:
    """List every run under a folder, including earlier attempts, and update the index if possible.

    Args:
        use_index: whether an existing index may be used.
        is_read_only: whether nothing may be written there, the index included.

    Raises:
        UsageError: there is no such folder.
    """
    if not store.is_dir():
        raise UsageError(f"{store}: no such folder; give a folder of run directories")
    with gc_suspended():
        started = file_system_time_ns(store) if not is_read_only else None
        schema = _schema()
        indexed = read_index(store, schema, _record_of_line, started) if use_index else {}
        lines: List[bytes] = []
        runs: List[RunRecord] = []
        read = 0
        writer = LineWriter()
        for folder in find_run_folders(store, indexed):
            entry = indexed.get(folder.path)
            if entry is not None and entry.fingerprint == folder.fingerprint and entry.files == folder.files:
                runs.append(entry.record)
                lines.append(entry.line)
                continue
            record, is_portable = _read(store, folder.path)
            read += 1
            if record is None:  # moved away in the meantime
                continue
            runs.append(record)
            if started is not None and is_portable and _is_final(record) and is_settled(folder.newest_ns, started):
                values = _values_of(record)
                lines.append(writer.line(record.run, folder.files, folder.fingerprint, values, record.settings))
        if started is not None and lines != [entry.line for entry in indexed.values()]:
            with contextlib.suppress(OSError):  # a read-only store is listed as well
                write_index(store, schema, started, lines)
        return Listing(runs, read)


def reindex(store: Path) -> Tuple[Listing, int]:
    """Discard the index and read every run; return the listing and the number of temporary files removed.

    Raises:
        UsageError: there is no such folder, or the index cannot be written there.
    """
    if not store.is_dir():
        raise UsageError(f"{store}: no such folder; give a folder of run directories")
    with contextlib.suppress(FileNotFoundError):
        remove_file(store / FILE)
    removed = 0
    listing = list_runs(store, use_index=False)
    for folder in {store, *(store / record.run for record in listing.runs)}:
        for path in leftovers(folder):
            remove_file(path)
            removed += 1
    return listing, removed


def read_record(store: Path, path: str) -> Optional[RunRecord]:
    """Read the summary of one run directory; None if it does not exist (any more)."""
    return _read(store, path)[0]


def _read(store: Path, path: str) -> Tuple[Optional[RunRecord], bool]:
    """Read a summary; returns too whether it would be the same if the store was elsewhere."""
    directory = RunDirectory(store / path)
    problems: List[str] = []
    settings: Dict[str, Any] = {}
    size, is_portable = "", True
    try:
        recorded = load_recorded(directory.config_file)
        settings, size, is_portable = recorded.settings, size_name(recorded.config.model), recorded.is_portable
    except ConfigError as error:
        if not directory.path.is_dir():
            return None, False
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
        from fugaku_gpt.jobs.outcome import job_outcome  # here: most runs have ended, and it imports much

        outcome = _read_or_report(lambda: job_outcome(directory.path), problems)
        if outcome is not None:
            status, reason = outcome.status or outcome.state or UNFINISHED, outcome.cause
    summary = result.summary if result is not None else {"seconds_per_iteration": last.get("seconds")}
    build = environment.get("build")
    job = history.jobs[-1] if history is not None and history.jobs else None
    record = RunRecord(
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
    return record, is_portable


def _settings_of_refused(file: Path) -> Dict[str, Any]:
    """The changed settings of a file that makes no valid run, as far as they can be read."""
    try:
        return readable_settings(dict(flatten(read_yaml_file(file))))
    except ConfigError:
        return {}


@lru_cache(maxsize=1)
def _schema() -> str:
    """Digest of what records are made of: one of another program may have other settings that are not the default."""
    schema = [__version__, RunRecord._fields, FIGURES, FILES, config_values(RunConfig())]
    return hashlib.sha256(json.dumps(schema).encode("utf-8")).hexdigest()[:32]


# the fields of a record in a line of the index, and after them its figures; settings are apart, since runs share them
_IN_LINE = tuple(name for name in RunRecord._fields if name not in ("run", "settings", "figures"))
_TEXT, _NUMBER, _FIGURE = (str,), (int, float), (int, float, type(None))
_TYPES = tuple(
    (int,) if name in ("repeat", "attempt", "iterations") else _NUMBER if name in ("started", "ended") else _TEXT
    for name in _IN_LINE
)


def _values_of(record: RunRecord) -> List[Any]:
    return [*(getattr(record, name) for name in _IN_LINE), [record.figures.get(name) for name in FIGURES]]


def _record_of_line(run: str, values: List[Any], settings: Dict[str, Any]) -> RunRecord:
    """The record of a line of the index.

    Raises:
        ValueError: the values are not those of a record.
    """
    *simple, figures = values
    _check_types(tuple(map(type, simple)), tuple(map(type, figures)))
    (status, reason, sweep, row, variant, repeat, attempt, digest, size, iterations, started, ended) = simple[:12]
    if not (0 <= started < LATEST and 0 <= ended < LATEST):
        raise ValueError("times that no calendar has")
    shown = {name: value for name, value in zip(FIGURES, figures) if value is not None}
    of_sweep = map(sys.intern, (sweep, row, variant))
    fields = (run, status, reason, *of_sweep, repeat, attempt, sys.intern(digest), settings, sys.intern(size))
    return RunRecord._make((*fields, iterations, shown, started, ended, *map(sys.intern, simple[12:])))


@lru_cache(maxsize=1024)
def _check_types(simple: Tuple[type, ...], figures: Tuple[type, ...]) -> None:
    fits = len(simple) == len(_TYPES) and all(kind in valid for kind, valid in zip(simple, _TYPES))
    if not fits or len(figures) != len(FIGURES) or not all(kind in _FIGURE for kind in figures):
        raise ValueError("values of other types")


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
