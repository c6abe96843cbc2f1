"""Jobs by their ids: those that a run directory has a record of, and those that were submitted by other means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.outcome import outcome_of_other_job
from fugaku_gpt.jobs.poll import PolledRun, directories_below
from fugaku_gpt.jobs.schedulers.protocol import Scheduler
from fugaku_gpt.jobs.schedulers.registry import NAMES, is_present, read_job_id, scheduler_named
from fugaku_gpt.records.job import UNKNOWN, JobStatus, read_history


@dataclass(frozen=True)
class NamedJob:
    """A job or sub-job that a command line names by its id.

    Attributes:
        directory: the run directory with the record of it; None if it was submitted by other means.
    """

    scheduler: str
    job_id: str
    directory: Optional[Path] = None


def resolve_targets(
    targets: Sequence[Path], store: Path, scheduler: Optional[str] = None
) -> Tuple[List[Path], List[NamedJob]]:
    """Split what a command line names into folders and jobs.

    A target that is no folder and has the form of a job id is looked up in ``store``: a run directory there may have a
    record of it.

    Args:
        scheduler: name of the scheduler of the ids; default: the one whose ids have this form and whose commands are on
            this machine.

    Raises:
        UsageError: a target is neither, or its scheduler is not known.
    """
    folders: List[Path] = []
    jobs: List[NamedJob] = []
    for target in targets:
        names = _schedulers_of(str(target), scheduler)
        if target.is_dir() or not names:
            folders.append(target)
            continue
        recorded = _recorded_job(store, str(target), names)
        jobs.append(recorded or NamedJob(_only_present(str(target), names), str(target)))
    return folders, jobs


def poll_other_jobs(
    jobs: Sequence[NamedJob], make_scheduler: Callable[[str], Scheduler] = scheduler_named
) -> List[PolledRun]:
    """Return what jobs without a record are doing; each scheduler is asked once. Their output is looked for in the
    present folder."""
    polled = []
    for name in dict.fromkeys(job.scheduler for job in jobs):
        scheduler, job_ids = make_scheduler(name), [job.job_id for job in jobs if job.scheduler == name]
        try:
            statuses = scheduler.poll(job_ids)
        except UsageError as error:
            statuses = {job_id: JobStatus(job_id, UNKNOWN, reason=str(error).splitlines()[0]) for job_id in job_ids}
        for job_id in job_ids:
            status = statuses.get(job_id, JobStatus(job_id, UNKNOWN))
            outcome = outcome_of_other_job(name, status, scheduler.output_files(Path.cwd(), job_id))
            run = PolledRun(Path(), outcome, name, job_id, 1, 1, status, start_folder=Path.cwd())
            polled.append(replace(run, is_recorded=False))
    return polled


def _schedulers_of(text: str, scheduler: Optional[str]) -> List[str]:
    """Names of the schedulers whose ids have this form."""
    return [name for name in NAMES if scheduler in (None, name) and read_job_id(name, text) is not None]


def _recorded_job(store: Path, text: str, names: Sequence[str]) -> Optional[NamedJob]:
    """The newest job of this id that a run directory below a store has; None if there is none."""
    matching: List[Tuple[float, NamedJob]] = []
    for directory in directories_below(store) if store.is_dir() else []:
        for job in read_history(directory).jobs:
            job_id = read_job_id(job.scheduler, text) if job.scheduler in names else None
            if job_id is not None and job.job_id in (job_id.text, job_id.submitted):
                matching.append((job.time, NamedJob(job.scheduler, job_id.text, directory)))
    return max(matching, key=lambda item: item[0])[1] if matching else None


def _only_present(text: str, names: Sequence[str]) -> str:
    """The only scheduler among these whose commands are on this machine."""
    present = [name for name in names if is_present(name)]
    if len(names) == 1:
        return names[0]
    if len(present) != 1:
        problem = "several schedulers are" if present else "no scheduler is"
        raise UsageError(
            f"{text}: no run directory has a job of this id, and {problem} on this machine: name one with --scheduler"
        )
    return present[0]
