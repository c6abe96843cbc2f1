"""Submits the missing runs of a sweep as jobs, and reports the state of each run. Nothing here waits for a job.

The state of a run follows from its directory and from one query for all jobs, so it does not depend on who queries, how
often, or who was killed during a submission: an intent is written to ``job.jsonl`` before the scheduler is called (see
:mod:`fugaku_gpt.jobs.submission`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.environments.registry import with_profile_file
from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.before_submission import check_script
from fugaku_gpt.jobs.billing import node_hours
from fugaku_gpt.jobs.missing import missing_needs
from fugaku_gpt.jobs.poll import PolledRun, SchedulerFactory, poll_runs
from fugaku_gpt.jobs.render import render_from_files
from fugaku_gpt.jobs.schedulers.protocol import Refused, Scheduler
from fugaku_gpt.jobs.schedulers.registry import scheduler_named
from fugaku_gpt.jobs.submission import SCRIPT, PreparedJob, prepare_job, submit, with_absolute_paths
from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large
from fugaku_gpt.records.job import JOB_FILE, OVER, read_history
from fugaku_gpt.records.run import LOST, OK, REFUSED, RunDirectory
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

MISSING = "missing"  # no job was submitted, or the scheduler refused it
_MAX_SAME_REFUSALS = 2  # after this number of equal refusals in a row, the scheduler's answer is not about the row


@dataclass(frozen=True)
class RunStanding:
    """The state of one run.

    Attributes:
        directory: directory of the run.
        status: one of ``records.run.STATUSES``; else one of ``records.job.STATES`` while its job is queued or running;
            else ``MISSING``.
        reason: reason for the status, in one line; empty where there is none.
        advice: what to do; empty where nothing is to be done.
        in_flight: True if a job of it is, or may be, with a scheduler.
        job_id: id of its job; empty where it has none.
        iterations: number of finished iterations.
        seconds_per_iteration: time of an iteration; None where it was not measured.
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
    """A job that is to be submitted.

    Attributes:
        job: the prepared job; None where the run cannot be expressed as a job.
        refusal: why there is no job; empty where there is one.
    """

    run: Run
    job: Optional[PreparedJob]
    refusal: str = ""


@dataclass(frozen=True)
class SubmittedSweep:
    """The result of one submission of a sweep.

    Attributes:
        standings: states of all runs before the submission.
        job_ids: run → ids of its submitted jobs.
        refused: run → why it was not submitted.
        remaining: number of runs that are still to be submitted.
        stop_reason: why the remaining jobs were not tried; empty where all were.
    """

    standings: List[RunStanding]
    job_ids: Dict[str, List[str]]
    refused: Dict[str, str]
    remaining: int
    stop_reason: str = ""


OnJob = Callable[[int, int, PlannedJob, str], None]  # number of the job, total number, the job, its outcome


def run_standings(
    sweep: Sweep,
    out: Path,
    scheduler_factory: SchedulerFactory = scheduler_named,
    clock: Callable[[], float] = time.time,
    query_schedulers: bool = True,
) -> List[RunStanding]:
    """States of all runs of a sweep, in its order.

    Args:
        query_schedulers: True to query schedulers and record their answers, False to use the last recorded states.

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
    """Returns the recorded states of all runs, and the jobs to be submitted; queries no scheduler and writes nothing.

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
    is_chosen: Callable[[RunStanding], bool] = lambda standing: is_due(standing, resume=False),
    on_job: OnJob = lambda number, total, planned, outcome: None,
    confirm: Callable[[Sequence[PlannedJob]], bool] = lambda planned: True,
    scheduler_factory: SchedulerFactory = scheduler_named,
    clock: Callable[[], float] = time.time,
) -> SubmittedSweep:
    """Submits the missing runs of a sweep, as far as the limit allows, and returns.

    Args:
        plan: plan of the sweep; relative paths start at its ``base``.
        max_in_flight: maximum number of this sweep's jobs at schedulers at once; None for no limit.
        is_chosen: whether a run is to be submitted; default: the missing ones (:func:`is_due`). Earlier attempts are
            preserved.
        on_job: is called with the outcome of each job.
        confirm: is called before the first job is submitted; nothing is written where it returns False.
        scheduler_factory: returns the scheduler of a name.
        clock: returns the time, in seconds since the epoch.

    Raises:
        UsageError: another sweep runs in ``out``, ``out`` holds other runs, or the jobs lack a setting or a file.
    """
    with SweepLock(out):
        sweep = with_recorded_names(plan.sweep(), out)
        standings = run_standings(sweep, out, scheduler_factory, clock)
        due = [standing for standing in standings if is_chosen(standing)]
        in_flight = sum(1 for standing in standings if standing.in_flight)
        free_slots = len(due) if max_in_flight is None else max(0, max_in_flight - in_flight)
        jobs = [_plan_job(standing.run, out, plan) for standing in due[:free_slots]]
        _refuse_missing_needs(jobs)
        if not confirm(jobs):
            return SubmittedSweep(standings, {}, {}, len(due))
        write_plan(out, plan)
        for standing in standings:
            if standing.run.config is None:
                write_refused(sweep.name, standing.run, RunDirectory(standing.directory), standing.run.refusal, clock())
        job_ids, refused, stopped = _submit_jobs(sweep, jobs, out, on_job, scheduler_factory, clock)
        return SubmittedSweep(standings, job_ids, refused, len(due) - len(job_ids) - len(refused), stopped)


def _refuse_missing_needs(jobs: Sequence[PlannedJob]) -> None:
    """Refuses the whole sweep, before anything is written: what one job lacks, the others do as a rule."""
    lines = [line for planned in jobs if planned.job is not None for line in missing_needs(planned.job.config)]
    if lines:
        raise UsageError("\n".join(dict.fromkeys(lines)))


def is_due(standing: RunStanding, resume: bool) -> bool:
    """True if a run is to be submitted: it is missing, or it failed and failures are to be tried again."""
    if standing.in_flight or standing.run.config is None or standing.status == OK:
        return False
    # refused before any job was made: cheap to try again, and the cause may be gone
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
            write_refused(sweep.name, run, RunDirectory(directory), planned.refusal, clock())
            refused[run.name] = planned.refusal
            on_job(number, len(jobs), planned, f"refused: {first_line(planned.refusal)}")
            continue
        name = planned.job.config.job.scheduler
        try:
            write_entry(sweep.name, run, directory)
            prepared = prepare_job(planned.job.config, directory)
            if name not in schedulers:
                schedulers[name] = scheduler_factory(name)
            job_ids[run.name] = submit(prepared, schedulers[name], clock)
            on_job(number, len(jobs), planned, f"job {', '.join(job_ids[run.name])}")
        except Uncertain as error:
            on_job(number, len(jobs), planned, f"perhaps submitted: {first_line(str(error))}")
            return job_ids, refused, f"{name} does not answer clearly; the same command continues once it does"
        except Refused as error:
            refused[run.name] = str(error)
            message = first_line(str(error))
            on_job(number, len(jobs), planned, f"not submitted: {message}")
            same_refusals = [*same_refusals, message] if message in same_refusals else [message]
            if len(same_refusals) >= _MAX_SAME_REFUSALS:
                return job_ids, refused, f"{name} rejects every job for the same reason: {message}"
    return job_ids, refused, ""


def _plan_job(run: Run, out: Path, plan: SweepPlan) -> PlannedJob:
    assert run.config is not None
    base = Path(plan.base)
    try:
        named_config = with_profile_file(_with_job_name(run.config, run.name), Path(plan.file), base)
        config = with_absolute_paths(named_config, base)
        refuse_job_too_large(config)
        script = render_from_files(config, run.notes)
        check_script(script.text, config.job.scheduler, str(out / run.name / SCRIPT))
    except UsageError as error:
        return PlannedJob(run, None, str(error))
    return PlannedJob(run, PreparedJob(out / run.name, config, SCRIPT, script.text, node_hours(config), script.notes))


def _with_job_name(config: RunConfig, name: str) -> RunConfig:
    """The run with a job name that identifies it in lists of jobs."""
    return config if config.job.name else replace(config, job=replace(config.job, name=job_name_of(name)))


def _needs_query(directory: Path) -> bool:
    """True if a query of the scheduler may change the state, or the result of the ranks may not be final."""
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
    if result is not None and (result.status != LOST or job_id):  # lost without a job: `sweep run` was killed
        return RunStanding(run, directory, result.status, result.reason, "", False, job_id, iterations, pace)
    if not history.jobs and not history.open:
        reason = f"not submitted: {first_line(history.refused)}" if history.refused else ""
        return RunStanding(run, directory, MISSING, reason, "", False, "", iterations, pace)
    last_status = history.statuses.get(job_id)
    state = last_status.state if last_status is not None else "submitted"
    return RunStanding(run, directory, state, "", "", state not in OVER, job_id, iterations, pace)
