"""After jobs have ended: copies the scheduler's measurements into the run directories.

Only `job collect` uses this, before it makes a table of the runs' rows with ``report/collect.py``, which asks no
scheduler.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.poll import PolledRun, poll_runs
from fugaku_gpt.jobs.schedulers.protocol import Accounting, Scheduler
from fugaku_gpt.jobs.schedulers.registry import read_job_id, scheduler_named
from fugaku_gpt.pjm.stats import IDEAL, MEASURED, JobStatistics, read_stats_file
from fugaku_gpt.records.accounting import SAMPLING_SECONDS, JobAccount, Knob, write_accounting
from fugaku_gpt.records.job import OVER, JobHistory, JobStatus, read_history
from fugaku_gpt.records.run import RunDirectory

RunCallback = Callable[[Path], None]


@dataclass(frozen=True)
class Gathered:
    """Outcome of gathering for one run.

    Attributes:
        jobs: ids of the run's jobs.
        accounts: number of jobs for which the scheduler had figures.
        status: present status of the run; empty if it is not over.
        notes: what could not be obtained and why, and what was written; one line each.
    """

    directory: Path
    jobs: Tuple[str, ...]
    accounts: int
    status: str
    notes: Tuple[str, ...]


def gather(
    directories: Sequence[Path],
    make_scheduler: Callable[[str], Scheduler] = scheduler_named,
    clock: Callable[[], float] = time.time,
    on_run: Optional[RunCallback] = None,
) -> List[Gathered]:
    """Gather the measurements and results of the jobs of run directories, as far as each directory has them.

    Schedulers are asked as by ``job status`` (:func:`fugaku_gpt.jobs.poll.poll_runs`): once for all jobs that are not
    known to be over.

    Raises:
        UsageError: a file of a run is damaged.
    """
    gathered = []
    for run in poll_runs(directories, make_scheduler, clock):
        if on_run is not None:
            on_run(run.directory)
        gathered.append(_gather(run, make_scheduler))
    return gathered


def _gather(run: PolledRun, make_scheduler: Callable[[str], Scheduler]) -> Gathered:
    history = read_history(run.directory)
    notes = [f"{subject}: {why}" for subject, why in run.unanswered.items()]
    accounts = _accounts(run.directory, history, make_scheduler, notes)
    if accounts:
        write_accounting(run.directory, accounts)
    notes += _result_notes(run, history)
    status = run.outcome.status
    if not history.jobs:
        own = RunDirectory(run.directory).result()
        status = own.status if own is not None else ""
    return Gathered(run.directory, tuple(job.job_id for job in history.jobs), len(accounts), status, tuple(notes))


def _accounts(
    directory: Path, history: JobHistory, make_scheduler: Callable[[str], Scheduler], notes: List[str]
) -> Tuple[JobAccount, ...]:
    """Read the accounts of a run's jobs: PJM's from statistics files of the directory, others by asking the scheduler.
    Appends to ``notes`` why an account is missing."""
    accounts: Dict[str, JobAccount] = {}
    for path in sorted(directory.glob("*.stats")):
        for statistics in read_stats_file(path):
            account = _account_from_statistics(statistics, path)
            if _is_of_run(account.job_id, history):
                accounts[account.job_id] = account
    readable = [job for job in (read_job_id("pjm", job_id) for job_id in accounts) if job is not None]
    for job_id in {job.submitted for job in readable if job.index is not None}:
        accounts.pop(job_id, None)  # a bulk job's own file sums up its sub-jobs
    measured = {job.submitted for job in readable}
    for job in history.jobs:
        status = history.statuses.get(job.job_id)
        if job.job_id in measured or status is None or status.state not in OVER:
            continue
        if job.scheduler == "pjm":
            notes.append(f"job {job.job_id}: no statistics file *.{job.job_id}.stats (job.statistics: job asks for it)")
            continue
        try:
            accounting = make_scheduler(job.scheduler).accounting(directory, job.job_id)
        except UsageError as error:
            notes.append(f"job {job.job_id}: {str(error).splitlines()[0]}")
            continue
        if accounting is not None:
            accounts[job.job_id] = _account_from_accounting(job.scheduler, status, accounting)
        else:
            notes.append(f"job {job.job_id}: {job.scheduler} keeps no accounts")
    return tuple(accounts.values())


def _is_of_run(job_id: str, history: JobHistory) -> bool:
    """True if a statistics file belongs to a job of this run. If no job is recorded, the script was submitted by other
    means: then every file in the directory counts."""
    if not history.jobs:
        return True
    measured = read_job_id("pjm", job_id)
    return measured is not None and any(job.job_id == measured.submitted for job in history.jobs)


def _account_from_statistics(job: JobStatistics, path: Path) -> JobAccount:
    nodes = job.nodes_used or job.nodes_allocated
    too_short = job.elapsed_seconds is not None and job.elapsed_seconds < SAMPLING_SECONDS
    energy, power = ({}, {}) if too_short else (job.energy_joules, job.power_watts)
    return JobAccount(
        scheduler="pjm",
        job_id=job.job_id,
        elapsed_seconds=float(job.elapsed_seconds) if job.elapsed_seconds is not None else None,
        nodes=nodes.count if nodes is not None else None,
        energy_joules=energy.get(MEASURED),
        energy_joules_ideal=energy.get(IDEAL),
        power_watts=power.get(MEASURED),
        power_watts_ideal=power.get(IDEAL),
        knobs={name: Knob(knob.require, knob.alloc, knob.use) for name, knob in job.knobs.items()},
        capped=job.capping_date or "",
        max_memory_bytes=job.max_memory_bytes,
        exit_code=job.exit_code,
        signal=job.signal,
        code=job.code,
        reason=job.reason,
        source=path.name,
        values={key: value for key, value in job.values.items() if value is not None},
    )


def _account_from_accounting(scheduler: str, status: JobStatus, accounting: Accounting) -> JobAccount:
    elapsed = accounting.elapsed_seconds
    too_short = elapsed is not None and elapsed < SAMPLING_SECONDS
    return JobAccount(
        scheduler=scheduler,
        job_id=status.job_id,
        elapsed_seconds=elapsed,
        nodes=accounting.nodes,
        energy_joules=None if too_short else accounting.energy_joules,
        power_watts=None if too_short else accounting.power_watts,
        exit_code=status.exit_code,
        signal=status.signal,
        code=status.code,
        reason=status.reason,
        source=accounting.values.get("source", scheduler),
        values=dict(accounting.values),
    )


def _result_notes(run: PolledRun, history: JobHistory) -> List[str]:
    """Notes on the result that the poll has written, else why the run has none or how it failed; and what to do."""
    if not history.jobs and not history.open:
        return []
    notes = []
    if run.recorded is not None:
        reason = f": {run.recorded.reason}" if run.recorded.reason else ""
        notes.append(f"result written: {run.recorded.status}{reason}")
    elif run.outcome.cause and run.outcome.cause not in run.unanswered.values():
        notes.append(run.outcome.cause)
    if run.outcome.advice:
        notes.append(run.outcome.advice)
    return notes
