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
from fugaku_gpt.sweep.folder import attempts_of, enter, first_line, make_room, settled, write_refused
from fugaku_gpt.sweep.lock import SweepLock
from fugaku_gpt.sweep.names import job_name_of
from fugaku_gpt.sweep.plan import Plan, write_plan
from fugaku_gpt.sweep.progress import last_iteration

MISSING = "missing"  # nothing has been handed in, or it was not taken
_SAME_REFUSALS = 2  # after so many alike in a row the scheduler's answer is not about the row


@dataclass(frozen=True)
class Standing:
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
class Planned:
    """A job that is to be handed in.

    Attributes:
        job: as it would be written; None where the run cannot be said to its scheduler.
        refusal: why not.
    """

    run: Run
    job: Optional[PreparedJob]
    refusal: str = ""


@dataclass(frozen=True)
class Handed:
    """What one call has done.

    Attributes:
        standings: of all runs, as they were found.
        taken: run → ids of its jobs.
        refused: run → why it was not handed in.
        left: runs that are still to be handed in.
        stopped: why the rest was not tried; empty where all was.
    """

    standings: List[Standing]
    taken: Dict[str, List[str]]
    refused: Dict[str, str]
    left: int
    stopped: str = ""


Told = Callable[[int, int, Planned, str], None]  # number, of how many, what, what became of it


def standings_of(
    sweep: Sweep, out: Path, named: SchedulerFactory = scheduler_named, now: Callable[[], float] = time.time, ask: bool = True
) -> List[Standing]:
    """Where every run of a sweep stands, in its order.

    Args:
        ask: whether schedulers are asked, and what they say is recorded; else as was recorded last.

    Raises:
        UsageError: a record in a run directory is damaged.
    """
    asked = [out / run.name for run in sweep.runs if _has_open_job(out / run.name)]
    followed = {one.directory: one for one in poll_runs(asked, named, now)} if ask and asked else {}
    return [_standing(run, out / run.name, followed.get(out / run.name)) for run in sweep.runs]


def planned_jobs(sweep: Sweep, out: Path, plan: Plan, resume: bool) -> Tuple[List[Standing], List[Planned]]:
    """(where every run stands by its records, what would be handed in); asks nobody and writes nothing.

    Raises:
        UsageError: ``out`` holds other runs, or a damaged record.
    """
    sweep = settled(sweep, out)
    standings = standings_of(sweep, out, ask=False)
    return standings, [_planned(one.run, out, plan) for one in standings if is_wanted(one, resume)]


def submit_sweep(
    plan: Plan,
    out: Path,
    *,
    max_in_flight: Optional[int] = None,
    resume: bool = False,
    told: Told = lambda number, total, planned, said: None,
    agreed: Callable[[Sequence[Planned]], bool] = lambda planned: True,
    named: SchedulerFactory = scheduler_named,
    now: Callable[[], float] = time.time,
) -> Handed:
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
        sweep = settled(plan.sweep(), out)
        standings = standings_of(sweep, out, named, now)
        wanted = [one for one in standings if is_wanted(one, resume)]
        flying = sum(1 for one in standings if one.in_flight)
        room = len(wanted) if max_in_flight is None else max(0, max_in_flight - flying)
        jobs = [_planned(one.run, out, plan) for one in wanted[:room]]
        if not agreed(jobs):
            return Handed(standings, {}, {}, len(wanted))
        write_plan(out, plan)
        for one in standings:
            if one.run.config is None:
                write_refused(sweep, one.run, RunDirectory(one.directory), one.run.refusal, now())
        taken, refused, stopped = _hand_in(sweep, jobs, out, told, named, now)
        return Handed(standings, taken, refused, len(wanted) - len(taken) - len(refused), stopped)


def is_wanted(standing: Standing, resume: bool) -> bool:
    """Whether a run is to be handed in: it is missing, or it has failed and failures are to be tried again."""
    if standing.in_flight or standing.run.config is None or standing.status == OK:
        return False
    # refused before any job was made: cheap to ask again, and the cause may be gone
    return resume or standing.status == MISSING or (standing.status == REFUSED and not standing.job_id)


def _hand_in(
    sweep: Sweep, jobs: Sequence[Planned], out: Path, told: Told, named: SchedulerFactory, now: Callable[[], float]
) -> Tuple[Dict[str, List[str]], Dict[str, str], str]:
    schedulers: Dict[str, Scheduler] = {}
    taken: Dict[str, List[str]] = {}
    refused: Dict[str, str] = {}
    alike: List[str] = []
    for number, planned in enumerate(jobs, start=1):
        run, directory = planned.run, out / planned.run.name
        make_room(directory, attempts_of(out, run))
        if planned.job is None:
            write_refused(sweep, run, RunDirectory(directory), planned.refusal, now())
            refused[run.name] = planned.refusal
            told(number, len(jobs), planned, f"refused: {first_line(planned.refusal)}")
            continue
        name = planned.job.config.job.scheduler
        try:
            enter(sweep, run, directory)
            prepared = prepare_job(planned.job.config, directory)
            if name not in schedulers:
                schedulers[name] = named(name)
            taken[run.name] = submit(prepared, schedulers[name], now)
            told(number, len(jobs), planned, f"job {', '.join(taken[run.name])}")
        except Uncertain as error:
            told(number, len(jobs), planned, f"perhaps taken: {first_line(str(error))}")
            return taken, refused, f"{name} does not answer clearly; the same command goes on once it does"
        except Refused as error:
            refused[run.name] = str(error)
            said = first_line(str(error))
            told(number, len(jobs), planned, f"not taken: {said}")
            alike = [*alike, said] if said in alike else [said]
            if len(alike) >= _SAME_REFUSALS:
                return taken, refused, f"{name} refuses one like the other: {said}"
    return taken, refused, ""


def _planned(run: Run, out: Path, plan: Plan) -> Planned:
    assert run.config is not None
    base = Path(plan.base)
    try:
        named = with_profile_file(_named(run.config, run.name), Path(plan.file), base)
        config = with_absolute_paths(named, base)
        refuse_job_too_large(config)
        script = render_from_files(config)
    except UsageError as error:
        return Planned(run, None, str(error))
    return Planned(run, PreparedJob(out / run.name, config, SCRIPT, script.text, node_hours(config), script.notes))


def _named(config: RunConfig, name: str) -> RunConfig:
    """The run with a job name, so that a list of jobs says which run is which."""
    return config if config.job.name else replace(config, job=replace(config.job, name=job_name_of(name)))


def _has_open_job(directory: Path) -> bool:
    """Whether a scheduler could tell something new, or the ranks' result may not be the last word."""
    if not (directory / JOB_FILE).exists():
        return False
    result = RunDirectory(directory).result()
    return result is None or result.judged or result.status != OK


def _standing(run: Run, directory: Path, followed: Optional[PolledRun]) -> Standing:
    record = RunDirectory(directory)
    result = record.result()
    if run.config is None:
        return Standing(run, directory, REFUSED, run.refusal.replace("\n", "; "))
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
        return Standing(
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
        return Standing(run, directory, result.status, result.reason, "", False, job_id, iterations, pace)
    if not history.jobs and not history.open:
        reason = f"not taken: {first_line(history.refused)}" if history.refused else ""
        return Standing(run, directory, MISSING, reason, "", False, "", iterations, pace)
    last = history.statuses.get(job_id)
    state = last.state if last is not None else "submitted"
    return Standing(run, directory, state, "", "", state not in OVER, job_id, iterations, pace)
