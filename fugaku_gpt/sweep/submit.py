"""Hands in what a sweep is missing, as jobs, and says where each run stands. Nothing here waits for a job.

Where a run stands follows from its directory and from one query for all jobs, so it makes no difference who asks, how
often, or who was killed while handing in: an intent stands in ``job.jsonl`` before the scheduler is called (see
:mod:`fugaku_gpt.jobs.submission`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.environments.registry import with_profile_file
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.poll import PolledRun, SchedulerFactory, poll_runs
from fugaku_gpt.jobs.render import render_from_files
from fugaku_gpt.jobs.schedulers.protocol import Refused, Scheduler, Uncertain
from fugaku_gpt.jobs.schedulers.registry import scheduler_named
from fugaku_gpt.jobs.submission import SCRIPT, PreparedJob, node_hours, prepare_job, submit, with_absolute_paths
from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large
from fugaku_gpt.records.job import JOB_FILE, OVER, read_history
from fugaku_gpt.records.run import OK, REFUSED, RunDirectory
from fugaku_gpt.sweep.expand import Run, Sweep
from fugaku_gpt.sweep.folder import (
    attempts_of,
    first_line,
    move_attempt_aside,
    with_recorded_names,
    write_entry,
    write_refused,
)
from fugaku_gpt.sweep.lock import SweepLock
from fugaku_gpt.sweep.names import job_name_of
from fugaku_gpt.sweep.plan import SweepPlan, write_plan
from fugaku_gpt.sweep.progress import last_iteration

MISSING = "missing"  # nothing has been handed in, or it was not taken
_MAX_SAME_REFUSALS = 2  # after so many alike in a row the scheduler's answer is not about the row


@dataclass(frozen=True)
class RunStanding:
    """Where one run stands.

    Attributes:
        directory: of the run.
        status: one of ``records.run.STATUSES``; else one of ``records.job.STATES`` while its job is on its way; else
            ``MISSING``.
        reason: why, in one line; empty where nothing is to be said.
        advice: what to do; empty where nothing.
        in_flight: whether a job of it is, or may be, with a scheduler.
        job_id: of its job; empty where it has none.
        iterations: finished so far.
        seconds_per_iteration: as far as measured; None where nothing was.
    """

    run: Run
    directory: Path
    status: str
    reason: str = ""
    advice: str = ""
    in_flight: bool = False
    job_id: str = ""
    iterations: int = 0
    seconds_per_iteration: Optional[float] = None


@dataclass(frozen=True)
class PlannedJob:
    """A job that is to be handed in.

    Attributes:
        job: as it would be written; None where the run cannot be said to its scheduler.
        refusal: why not.
    """

    run: Run
    job: Optional[PreparedJob]
    refusal: str = ""


@dataclass(frozen=True)
class SubmittedSweep:
    """What one call has done.

    Attributes:
        standings: of all runs, as they were found.
        taken: run → ids of its jobs.
        refused: run → why it was not handed in.
        left: runs that are still to be handed in.
        stopped: why the rest was not tried; empty where all was.
    """

    standings: List[RunStanding]
    job_ids: Dict[str, List[str]]
    refused: Dict[str, str]
    remaining: int
    stop_reason: str = ""


OnJob = Callable[[int, int, PlannedJob, str], None]  # number, of how many, what, what became of it


def run_standings(
    sweep: Sweep,
    out: Path,
    scheduler_factory: SchedulerFactory = scheduler_named,
    clock: Callable[[], float] = time.time,
    query_schedulers: bool = True,
) -> List[RunStanding]:
    """Where every run of a sweep stands, in its order.

    Args:
        ask: whether schedulers are asked, and what they say is recorded; else as was recorded last.

    Raises:
        UsageError: a record in a run directory is damaged.
    """
    directories = [out / run.name for run in sweep.runs if _needs_query(out / run.name)]
    followed = (
        {followed_run.directory: followed_run for followed_run in poll_runs(directories, scheduler_factory, clock)}
        if query_schedulers and directories
        else {}
    )
    return [_standing(run, out / run.name, followed.get(out / run.name)) for run in sweep.runs]


def planned_jobs(sweep: Sweep, out: Path, plan: SweepPlan, resume: bool) -> Tuple[List[RunStanding], List[PlannedJob]]:
    """(where every run stands by its records, what would be handed in); asks nobody and writes nothing.

    Raises:
        UsageError: ``out`` holds other runs, or a damaged record.
    """
    sweep = with_recorded_names(sweep, out)
    standings = run_standings(sweep, out, query_schedulers=False)
    return standings, [_plan_job(standing.run, out, plan) for standing in standings if is_due(standing, resume)]


def submit_sweep(
    plan: SweepPlan,
    out: Path,
    *,
    max_in_flight: Optional[int] = None,
    resume: bool = False,
    on_job: OnJob = lambda number, total, planned, outcome: None,
    confirm: Callable[[Sequence[PlannedJob]], bool] = lambda planned: True,
    scheduler_factory: SchedulerFactory = scheduler_named,
    clock: Callable[[], float] = time.time,
) -> SubmittedSweep:
    """Submit the runs of a sweep that are missing, as far as the limit allows, and return.

    Args:
        plan: of the sweep; its ``base`` is where relative paths start.
        max_in_flight: jobs of this sweep that may be with schedulers at once; None for no limit.
        resume: also hand in again what has failed; earlier attempts are kept.
        told: hears of each job.
        agreed: is asked before the first job is handed in; nothing is written where it says no.

    Raises:
        UsageError: another sweep is at work in ``out``, or ``out`` holds other runs.
    """
    with SweepLock(out):
        sweep = with_recorded_names(plan.sweep(), out)
        standings = run_standings(sweep, out, scheduler_factory, clock)
        due = [standing for standing in standings if is_due(standing, resume)]
        in_flight = sum(1 for standing in standings if standing.in_flight)
        free_slots = len(due) if max_in_flight is None else max(0, max_in_flight - in_flight)
        jobs = [_plan_job(standing.run, out, plan) for standing in due[:free_slots]]
        if not confirm(jobs):
            return SubmittedSweep(standings, {}, {}, len(due))
        write_plan(out, plan)
        for standing in standings:
            if standing.run.config is None:
                write_refused(sweep, standing.run, RunDirectory(standing.directory), standing.run.refusal, clock())
        job_ids, refused, stopped = _submit_jobs(sweep, jobs, out, on_job, scheduler_factory, clock)
        return SubmittedSweep(standings, job_ids, refused, len(due) - len(job_ids) - len(refused), stopped)


def is_due(standing: RunStanding, resume: bool) -> bool:
    """Whether a run is to be handed in: it is missing, or it has failed and failures are to be tried again."""
    if standing.in_flight or standing.run.config is None or standing.status == OK:
        return False
    # refused before any job was made: cheap to ask again, and the cause may be gone
    return resume or standing.status == MISSING or (standing.status == REFUSED and not standing.job_id)


def _submit_jobs(
    sweep: Sweep,
    jobs: Sequence[PlannedJob],
    out: Path,
    on_job: OnJob,
    scheduler_factory: SchedulerFactory,
    clock: Callable[[], float],
) -> Tuple[Dict[str, List[str]], Dict[str, str], str]:
    schedulers: Dict[str, Scheduler] = {}
    job_ids: Dict[str, List[str]] = {}
    refused: Dict[str, str] = {}
    same_refusals: List[str] = []
    for number, planned in enumerate(jobs, start=1):
        run, directory = planned.run, out / planned.run.name
        move_attempt_aside(directory, attempts_of(out, run))
        if planned.job is None:
            write_refused(sweep, run, RunDirectory(directory), planned.refusal, clock())
            refused[run.name] = planned.refusal
            on_job(number, len(jobs), planned, f"refused: {first_line(planned.refusal)}")
            continue
        name = planned.job.config.job.scheduler
        try:
            write_entry(sweep, run, directory)
            prepared = prepare_job(planned.job.config, directory)
            if name not in schedulers:
                schedulers[name] = scheduler_factory(name)
            job_ids[run.name] = submit(prepared, schedulers[name], clock)
            on_job(number, len(jobs), planned, f"job {', '.join(job_ids[run.name])}")
        except Uncertain as error:
            on_job(number, len(jobs), planned, f"perhaps taken: {first_line(str(error))}")
            return job_ids, refused, f"{name} does not answer clearly; the same command goes on once it does"
        except Refused as error:
            refused[run.name] = str(error)
            message = first_line(str(error))
            on_job(number, len(jobs), planned, f"not taken: {message}")
            same_refusals = [*same_refusals, message] if message in same_refusals else [message]
            if len(same_refusals) >= _MAX_SAME_REFUSALS:
                return job_ids, refused, f"{name} refuses one like the other: {message}"
    return job_ids, refused, ""


def _plan_job(run: Run, out: Path, plan: SweepPlan) -> PlannedJob:
    assert run.config is not None
    base = Path(plan.base)
    try:
        named_config = with_profile_file(_with_job_name(run.config, run.name), Path(plan.file), base)
        config = with_absolute_paths(named_config, base)
        refuse_job_too_large(config)
        script = render_from_files(config)
    except UsageError as error:
        return PlannedJob(run, None, str(error))
    return PlannedJob(run, PreparedJob(out / run.name, config, SCRIPT, script.text, node_hours(config), script.notes))


def _with_job_name(config: RunConfig, name: str) -> RunConfig:
    """The run with a job name, so that a list of jobs says which run is which."""
    return config if config.job.name else replace(config, job=replace(config.job, name=job_name_of(name)))


def _needs_query(directory: Path) -> bool:
    """Whether a scheduler could tell something new, or the ranks' result may not be the last word."""
    if not (directory / JOB_FILE).exists():
        return False
    result = RunDirectory(directory).result()
    return result is None or result.judged or result.status != OK


def _standing(run: Run, directory: Path, followed: Optional[PolledRun]) -> RunStanding:
    record = RunDirectory(directory)
    result = record.result()
    if run.config is None:
        return RunStanding(run, directory, REFUSED, run.refusal.replace("\n", "; "))
    line = last_iteration(record.metrics_file) or {}
    iterations = int(line.get("iteration") or 0)
    pace = line.get("seconds")
    history = read_history(directory)
    job_id = history.jobs[-1].job_id if history.jobs else ""
    if result is not None:
        pace = result.summary.get("seconds_per_iteration", pace)
        iterations = result.iterations or iterations
    if followed is not None:
        verdict = followed.outcome
        status = verdict.status or (result.status if result is not None and followed.is_over else "")
        return RunStanding(
            run,
            directory,
            status or (verdict.state if not followed.is_over else "") or MISSING,
            verdict.cause,
            verdict.advice,
            not followed.is_over,
            followed.job_id or job_id,
            iterations,
            pace,
        )
    if result is not None:
        return RunStanding(run, directory, result.status, result.reason, "", False, job_id, iterations, pace)
    if not history.jobs and not history.open:
        reason = f"not taken: {first_line(history.refused)}" if history.refused else ""
        return RunStanding(run, directory, MISSING, reason, "", False, "", iterations, pace)
    last_status = history.statuses.get(job_id)
    state = last_status.state if last_status is not None else "submitted"
    return RunStanding(run, directory, state, "", "", state not in OVER, job_id, iterations, pace)
