"""Many run directories and their jobs: what each is doing, with one query for each scheduler."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.judge import Verdict, deciding_job, diagnose, record_result
from fugaku_gpt.jobs.schedulers.commands import LONGEST_WAIT_SECONDS, waits
from fugaku_gpt.jobs.schedulers.protocol import Scheduler
from fugaku_gpt.jobs.schedulers.registry import scheduler_named, sub_job_ids
from fugaku_gpt.jobs.submission import resolve
from fugaku_gpt.records.job import (
    JOB_FILE,
    LOST,
    OVER,
    UNKNOWN,
    JobHistory,
    JobStatus,
    append_status,
    exit_records,
    read_history,
)
from fugaku_gpt.records.sweep import ATTEMPTS

Named = Callable[[str], Scheduler]
_DEPTH = 3  # of folders below one that is named: a store of sweeps of runs
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Followed:
    """One run directory.

    Attributes:
        scheduler: empty where nothing was handed in.
        job_id: of the deciding job: the running link of a chain, or the one by which it has ended.
        link, chain: which link that is, of how many; 0 where nothing was handed in.
        status: what the scheduler says of it; None where nothing was handed in.
    """

    directory: Path
    verdict: Verdict
    scheduler: str = ""
    job_id: str = ""
    link: int = 0
    chain: int = 0
    status: Optional[JobStatus] = None

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return bool(self.verdict.status) or not self.verdict.state


def job_directories(paths: Sequence[Path]) -> List[Path]:
    """The run directories with jobs among ``paths`` and below them; earlier attempts are left out.

    Raises:
        UsageError: a path is no folder, or holds none.
    """
    found: Dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path}: no such folder; give a run directory, or a folder of run directories")
        here = list(_below(path, _DEPTH))
        if not here:
            raise UsageError(
                f"{path}: holds no run directory with a job ({JOB_FILE}); `fugaku-gpt job submit` makes one"
            )
        found.update((one, None) for one in here)
    return list(found)


def poll_runs(
    directories: Sequence[Path], named: Named = scheduler_named, now: Callable[[], float] = time.time
) -> List[Followed]:
    """What each run directory's job is doing: asks each scheduler once for all jobs that are not known to be over,
    records what has changed, and writes the results of runs whose ranks could not.

    A scheduler that is not there or does not answer makes no error: what our own records say is still told. Nor does a
    damaged record: what became of that directory's job is unknown until it is mended, and the others are told.
    """
    schedulers: Dict[str, Scheduler] = {}
    histories: Dict[Path, JobHistory] = {}
    troubles: Dict[Path, str] = {}
    for directory in directories:
        try:
            history = read_history(directory)
        except UsageError as error:
            troubles[directory], histories[directory] = _line(error), JobHistory()
            continue
        for name in {intent.scheduler for intent in history.open}:
            try:
                history = resolve(directory, _one(schedulers, name, named), now())
            except UsageError as error:
                troubles[directory] = _line(error)
        histories[directory] = history
    asked: Dict[str, List[str]] = {}
    for history in histories.values():
        for job in history.jobs:
            if _open(history, job.job_id):
                asked.setdefault(job.scheduler, []).append(job.job_id)
    answers: Dict[Tuple[str, str], JobStatus] = {}
    for name, ids in asked.items():
        try:
            answer = _one(schedulers, name, named).poll(ids)
        except UsageError as error:
            answer = {job_id: JobStatus(job_id, UNKNOWN, reason=_line(error)) for job_id in ids}
        answers.update(((name, job_id), status) for job_id, status in answer.items())
    followed = []
    for one in directories:
        try:
            followed.append(_followed(one, histories[one], answers, troubles.get(one, ""), now()))
        except UsageError as error:
            verdict = Verdict("", UNKNOWN, _line(error), "mend it, or remove it")
            known = [(job.scheduler, job.job_id, job.link, job.chain) for job in histories[one].jobs]
            followed.append(Followed(one, verdict, *(known[-1] if known else ("", "", 0, 0))))
    return followed


def watch(
    directories: Sequence[Path],
    named: Named = scheduler_named,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    longest: float = LONGEST_WAIT_SECONDS,
) -> Iterator[List[Followed]]:
    """:func:`poll_runs` again and again until all are over; after a change soon, else after 2, 4, 8 and up to
    ``longest`` seconds. Stopping it, or killing it, changes nothing for the jobs."""
    pauses, before = waits(longest=longest), None
    while True:
        sleep(next(pauses))
        seen = poll_runs(directories, named, now)
        yield seen
        if all(one.over for one in seen):
            return
        shown = [(one.job_id, one.verdict) for one in seen]
        if shown != before:
            pauses, before = waits(longest=longest), shown
            next(pauses)


def output_of(followed: Followed, named: Named = scheduler_named) -> List[Path]:
    """Files that the deciding job has printed into: the script's own first, then those of its ranks."""
    if not followed.job_id:
        return []
    return named(followed.scheduler).output_files(followed.directory, followed.job_id)


def _below(path: Path, depth: int) -> Iterator[Path]:
    if (path / JOB_FILE).exists():
        yield path
        return
    if depth == 0:
        return
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and entry.name != ATTEMPTS)
    for name in names:
        if not name.startswith("."):
            yield from _below(path / name, depth - 1)


def _one(schedulers: Dict[str, Scheduler], name: str, named: Named) -> Scheduler:
    if name not in schedulers:
        schedulers[name] = named(name)
    return schedulers[name]


def _open(history: JobHistory, job_id: str) -> bool:
    """Whether the scheduler can still tell something new of a job; one that was lost may turn up again."""
    status = history.statuses.get(job_id)
    return status is None or status.state not in OVER or status.state == LOST


def _followed(
    directory: Path,
    history: JobHistory,
    answers: Dict[Tuple[str, str], JobStatus],
    trouble: str,
    now: float,
) -> Followed:
    for job in history.jobs:
        for job_id in {job.job_id: None, **dict.fromkeys(sub_job_ids(job))}:
            status = answers.get((job.scheduler, job_id))
            whole = job_id == job.job_id
            if status is None or status == history.statuses.get(job_id) or not (whole or status.state in OVER):
                continue
            if status.state == UNKNOWN and job_id in history.statuses:
                continue  # no news is not written down: the last known state is better
            _record(directory, now, status)
    history = read_history(directory)
    job_ = deciding_job(history, exit_records(directory))
    if job_ is None:
        verdict = diagnose(directory)
        cause = f"{verdict.cause}; {trouble}" if trouble else verdict.cause
        return Followed(directory, Verdict(verdict.status, verdict.state, cause, verdict.advice, verdict.retry))
    status = answers.get((job_.scheduler, job_.job_id), history.statuses.get(job_.job_id))
    verdict = diagnose(directory, status)
    try:
        record_result(directory, verdict, now)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
    return Followed(directory, verdict, job_.scheduler, job_.job_id, job_.link, job_.chain, status)


def _record(directory: Path, now: float, status: JobStatus) -> None:
    """Write down a status; who may only read a directory looks on without."""
    try:
        append_status(directory, now, status)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise


def _line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())
