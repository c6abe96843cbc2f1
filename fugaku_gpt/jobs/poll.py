"""Polls the jobs of many run directories, with one query for each scheduler."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.outcome import Outcome, deciding_job, job_outcome, record_result
from fugaku_gpt.jobs.schedulers.commands import MAX_WAIT_SECONDS, query_intervals
from fugaku_gpt.jobs.schedulers.protocol import Scheduler
from fugaku_gpt.jobs.schedulers.registry import scheduler_named, sub_job_ids
from fugaku_gpt.jobs.submission import close_intents
from fugaku_gpt.records.job import (
    JOB_FILE,
    LOST,
    OVER,
    UNKNOWN,
    Intent,
    JobHistory,
    JobStatus,
    append_status,
    exit_records,
    read_history,
)
from fugaku_gpt.records.run import Result
from fugaku_gpt.records.sweep import ATTEMPTS

SchedulerFactory = Callable[[str], Scheduler]
_MAX_DEPTH = 3  # levels of folders below a given one: a store of sweeps of runs
_READ_ONLY_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class PolledRun:
    """The state of one run directory.

    Attributes:
        scheduler: name of the scheduler; empty if nothing was submitted.
        job_id: id of the deciding job: the running link of a chain, or the link with which the chain ended.
        link, chain: number of that link, and number of links; 0 if nothing was submitted.
        status: the scheduler's status of that job; None if nothing was submitted.
        recorded: result of the run that this poll wrote; None if there was nothing to write.
        unanswered: what a scheduler did not answer, such as ``job 7`` → the reason.
        start_folder: folder in which the job starts and leaves its output; None for the run directory.
        is_recorded: whether a run directory has a record of the job.
    """

    directory: Path
    outcome: Outcome
    scheduler: str = ""
    job_id: str = ""
    link: int = 0
    chain: int = 0
    status: Optional[JobStatus] = None
    recorded: Optional[Result] = None
    unanswered: Mapping[str, str] = field(default_factory=dict)
    start_folder: Optional[Path] = None
    is_recorded: bool = True

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or there is none."""
        return bool(self.outcome.status) or not self.outcome.state


def job_directories(paths: Sequence[Path]) -> List[Path]:
    """Return the run directories with jobs among ``paths`` and below them, without earlier attempts.

    Raises:
        UsageError: a path is not a folder, or holds no run directory with a job.
    """
    directories: Dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path}: no such folder; give a run directory, or a folder of run directories")
        below = list(directories_below(path))
        if not below:
            raise UsageError(
                f"{path}: holds no run directory with a job ({JOB_FILE}); `fugaku-gpt job submit` makes one; "
                f"for a run without a job: `fugaku-gpt doctor {path}`"
            )
        directories.update((directory, None) for directory in below)
    return list(directories)


def only_run_directory(directory: Path) -> Path:
    """Return the one run directory with a job that is a folder, or is below it.

    Raises:
        UsageError: there is none, or there are several.
    """
    run_directories = job_directories([directory])
    if len(run_directories) != 1:
        raise UsageError(f"{directory}: holds {len(run_directories)} run directories; name one")
    return run_directories[0]


def poll_runs(
    directories: Sequence[Path],
    make_scheduler: SchedulerFactory = scheduler_named,
    clock: Callable[[], float] = time.time,
) -> List[PolledRun]:
    """Return what the job of each run directory is doing.

    All commands that follow runs poll here: each scheduler is asked once for the jobs of all open intents and once for
    all jobs that are not known to be over. What has changed is recorded, and so are the results of runs whose ranks
    could not. (Before a submission, ``submission.require_no_active_job`` polls that one directory itself.)

    A scheduler that is missing or does not answer is not an error: our own records still count. Nor is a damaged
    record: the outcome of that directory's job is unknown until the record is repaired, and the others are reported.
    """
    schedulers = _Schedulers(make_scheduler)
    histories: Dict[Path, JobHistory] = {}
    for directory in directories:
        try:
            histories[directory] = read_history(directory)
        except UsageError:  # read again below, where the directory is reported
            histories[directory] = JobHistory()
    errors = _resolve_intents(histories, schedulers, clock)
    answers = _poll_jobs(histories.values(), schedulers)
    polled = []
    for directory, history in histories.items():
        try:
            polled.append(_poll_directory(directory, history, answers, errors.get(directory, ""), clock()))
        except UsageError as error:
            outcome = Outcome("", UNKNOWN, _single_line(error), "repair it, or remove it")
            damaged = PolledRun(directory, outcome)
            if history.jobs:
                last = history.jobs[-1]
                damaged = PolledRun(directory, outcome, last.scheduler, last.job_id, last.link, last.chain)
            polled.append(damaged)
    return polled


def watch_runs(
    directories: Sequence[Path],
    make_scheduler: SchedulerFactory = scheduler_named,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    max_wait: float = MAX_WAIT_SECONDS,
) -> Iterator[List[PolledRun]]:
    """Call :func:`poll_runs` repeatedly until all runs are over; see :func:`watch_polls`."""
    return watch_polls(lambda: poll_runs(directories, make_scheduler, clock), sleep, max_wait)


def watch_polls(
    poll: Callable[[], List[PolledRun]],
    sleep: Callable[[float], None] = time.sleep,
    max_wait: float = MAX_WAIT_SECONDS,
) -> Iterator[List[PolledRun]]:
    """Poll repeatedly until all runs are over: soon after a change, otherwise after 2, 4, 8 and up to ``max_wait``
    seconds. Stopping or killing the watcher has no effect on the jobs."""
    intervals, before = query_intervals(max_wait=max_wait), None
    while True:
        sleep(next(intervals))
        polled = poll()
        yield polled
        if all(run.is_over for run in polled):
            return
        shown = [(run.job_id, run.outcome) for run in polled]
        if shown != before:
            intervals, before = query_intervals(max_wait=max_wait), shown
            next(intervals)


def output_of(polled: PolledRun, make_scheduler: SchedulerFactory = scheduler_named) -> List[Path]:
    """Return the output files of the deciding job: the script's own first, then those of its ranks."""
    if not polled.job_id:
        return []
    return make_scheduler(polled.scheduler).output_files(polled.start_folder or polled.directory, polled.job_id)


def directories_below(path: Path, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """Yield the run directories with jobs at ``path`` and below it, sorted by name, without earlier attempts."""
    if (path / JOB_FILE).exists():
        yield path
        return
    if depth == 0:
        return
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and entry.name != ATTEMPTS)
    for name in names:
        if not name.startswith("."):
            yield from directories_below(path / name, depth - 1)


class _Schedulers:
    """The schedulers of one poll, each constructed once.

    Args:
        make_scheduler: constructs a scheduler from its name; raises UsageError if there is none.
    """

    def __init__(self, make_scheduler: SchedulerFactory) -> None:
        self._make_scheduler = make_scheduler
        self._by_name: Dict[str, Scheduler] = {}

    def get(self, name: str) -> Scheduler:
        """Return the scheduler with this name."""
        if name not in self._by_name:
            self._by_name[name] = self._make_scheduler(name)
        return self._by_name[name]


def _resolve_intents(
    histories: Dict[Path, JobHistory], schedulers: _Schedulers, clock: Callable[[], float]
) -> Dict[Path, str]:
    """Search for the jobs of open intents, with one query for each scheduler, and bring ``histories`` up to date.

    Returns:
        Directory → why its intents could not be resolved.
    """
    searches: Dict[str, Dict[Path, List[Intent]]] = {}
    for directory, history in histories.items():
        for intent in history.open:
            searches.setdefault(intent.scheduler, {}).setdefault(directory, []).append(intent)
    errors: Dict[Path, str] = {}
    for name, search in searches.items():
        try:
            job_ids = schedulers.get(name).find([intent.tag for intents in search.values() for intent in intents])
        except UsageError as error:
            errors.update(dict.fromkeys(search, _single_line(error)))
            continue
        for directory, intents in search.items():
            try:
                histories[directory] = close_intents(directory, intents, job_ids, clock())
            except OSError as error:
                if error.errno not in _READ_ONLY_ERRORS:
                    raise
                errors[directory] = f"{directory / JOB_FILE}: cannot be written: {error.strerror}"
    return errors


def _poll_jobs(histories: Iterable[JobHistory], schedulers: _Schedulers) -> Dict[Tuple[str, str], JobStatus]:
    """Poll all jobs whose status may have changed: (scheduler, id of a job or sub-job) → status."""
    job_ids_by_scheduler: Dict[str, Dict[str, None]] = {}
    for history in histories:
        for job in history.jobs:
            if _may_change(history, job.job_id):
                job_ids_by_scheduler.setdefault(job.scheduler, {})[job.job_id] = None
    answers: Dict[Tuple[str, str], JobStatus] = {}
    for name, job_ids in job_ids_by_scheduler.items():
        reason = f"{name} does not answer for it"
        try:
            answer = schedulers.get(name).poll(list(job_ids))
        except UsageError as error:
            answer, reason = {}, _single_line(error)
        for job_id in job_ids:
            answers[name, job_id] = JobStatus(job_id, UNKNOWN, reason=reason)
        answers.update(((name, job_id), status) for job_id, status in answer.items())
    return answers


def _may_change(history: JobHistory, job_id: str) -> bool:
    """Whether the status of a job can still change; a lost job may reappear."""
    status = history.statuses.get(job_id)
    return status is None or status.state not in OVER or status.state == LOST


def _poll_directory(
    directory: Path,
    history: JobHistory,
    answers: Dict[Tuple[str, str], JobStatus],
    error: str,
    timestamp: float,
) -> PolledRun:
    for job in history.jobs:
        for job_id in {job.job_id: None, **dict.fromkeys(sub_job_ids(job))}:
            status = answers.get((job.scheduler, job_id))
            is_main_job = job_id == job.job_id
            if status is None or status == history.statuses.get(job_id) or not (is_main_job or status.state in OVER):
                continue
            if status.state == UNKNOWN and job_id in history.statuses:
                continue  # the last recorded state is more useful than `unknown`
            _append_status(directory, timestamp, status)
    history = read_history(directory)
    deciding = deciding_job(history, exit_records(directory))
    if deciding is None:
        outcome = job_outcome(directory)
        return PolledRun(directory, replace(outcome, cause=f"{outcome.cause}; {error}") if error else outcome)
    status = answers.get((deciding.scheduler, deciding.job_id), history.statuses.get(deciding.job_id))
    outcome = job_outcome(directory, status)
    return PolledRun(
        directory,
        outcome,
        deciding.scheduler,
        deciding.job_id,
        deciding.link,
        deciding.chain,
        status,
        _record_result(directory, outcome, timestamp),
        _unanswered(history, answers, error),
        deciding.start_folder(directory),
    )


def _unanswered(history: JobHistory, answers: Mapping[Tuple[str, str], JobStatus], error: str) -> Dict[str, str]:
    unanswered = {"submission": error} if error else {}
    for job in history.jobs:
        status = answers.get((job.scheduler, job.job_id))
        if status is not None and status.state == UNKNOWN:
            unanswered[f"job {job.job_id}"] = status.reason or UNKNOWN
    return unanswered


def _record_result(directory: Path, outcome: Outcome, timestamp: float) -> Optional[Result]:
    """Call :func:`record_result`, but write nothing in a read-only directory."""
    try:
        return record_result(directory, outcome, timestamp)
    except OSError as error:
        if error.errno not in _READ_ONLY_ERRORS:
            raise
        return None


def _append_status(directory: Path, timestamp: float, status: JobStatus) -> None:
    """Record a status, except in a read-only directory."""
    try:
        append_status(directory, timestamp, status)
    except OSError as error:
        if error.errno not in _READ_ONLY_ERRORS:
            raise


def _single_line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())
