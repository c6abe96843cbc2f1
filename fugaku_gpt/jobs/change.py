"""Changes of jobs that are with their schedulers: cancelled, held, released."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.by_id import NamedJob
from fugaku_gpt.jobs.schedulers.registry import scheduler_named
from fugaku_gpt.jobs.submission import resolve_intents
from fugaku_gpt.records.job import LOST, OVER, append_event, read_history


class JobChange(NamedTuple):
    """A change of a job.

    Attributes:
        verb: name of the method of schedulers.
        event: kind of the event that is recorded.
    """

    verb: str
    event: str


CANCEL, HOLD, RELEASE = JobChange("cancel", "cancelled"), JobChange("hold", "held"), JobChange("release", "released")


class Answer(NamedTuple):
    """The answer to a change of one job.

    Attributes:
        directory: run directory that has its record; None if none has.
        job_id: its id; empty for a submission whose job is not known yet.
        refusal: why it was not changed; empty if it was.
    """

    directory: Optional[Path]
    job_id: str
    refusal: str


def change_jobs(directories: Sequence[Path], jobs: Sequence[NamedJob], change: JobChange) -> Iterator[Answer]:
    """Ask each scheduler once to change jobs, record what it accepts, and yield the answers.

    Args:
        directories: run directories, whose jobs that are not over are changed.
        jobs: further jobs.

    Raises:
        UsageError: no job is waiting or running there, or a scheduler is missing.
    """
    changed: List[NamedJob] = list(jobs)
    has_open = False
    for directory in directories:
        history = read_history(directory)
        for name in {
            intent.scheduler for intent in history.open
        }:  # whoever submitted it may have been killed: is there a job?
            history = resolve_intents(directory, scheduler_named(name), time.time())
        if history.open:
            has_open = True
            yield Answer(directory, "", "a submission is not over, or was killed just now: try again in two minutes")
        for job in history.jobs:
            last = history.statuses.get(job.job_id)
            if last is None or last.state not in OVER or (change == CANCEL and last.state == LOST):
                changed.append(NamedJob(job.scheduler, job.job_id, directory))
    if not changed and not has_open:
        raise UsageError("no job is waiting or running there")
    for name in dict.fromkeys(job.scheduler for job in changed):
        directory_of = {job.job_id: job.directory for job in changed if job.scheduler == name}
        for job_id, refusal in getattr(scheduler_named(name), change.verb)(list(directory_of)).items():
            where = directory_of[job_id]
            if where is not None and not refusal:
                append_event(where, change.event, time.time(), job_id=job_id)
            yield Answer(where, job_id, refusal)
