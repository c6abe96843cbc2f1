"""Runs or submits the runs of a sweep for a command: progress on stderr, and confirmation on a terminal."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Union

import click

from fugaku_gpt.cli.output import echo
from fugaku_gpt.sweep.expand import Sweep
from fugaku_gpt.sweep.plan import SweepPlan

if TYPE_CHECKING:
    from fugaku_gpt.sweep.run import EndedRun
    from fugaku_gpt.sweep.submit import PlannedJob, SubmittedSweep


def run_on_this_machine(
    expanded: Sweep, out: Path, plan: SweepPlan, timeout: Optional[float] = None, retry_failed: bool = False
) -> List["EndedRun"]:
    """Run the missing runs of a sweep with mpirun, one at a time, and show the progress.

    Args:
        plan: what the sweep was expanded from.
        timeout: time limit of each run in seconds; None for none.
        retry_failed: whether failed runs are run again.

    Raises:
        UsageError: there is no launcher (nothing is written then), or ``out`` holds other runs.
    """
    from fugaku_gpt.launch.launcher import find_launcher, launch, require_rank_packages
    from fugaku_gpt.sweep.progress import LiveProgress, PlainProgress
    from fugaku_gpt.sweep.run import run_sweep

    find_launcher()  # both fail before anything is written, and say how to get what is missing
    require_rank_packages()
    display: Union[LiveProgress, PlainProgress] = LiveProgress() if sys.stderr.isatty() else PlainProgress(sys.stderr)
    with display as progress:
        return run_sweep(expanded, out, launch, progress, timeout=timeout, retry_failed=retry_failed, plan=plan)


def submit_jobs(
    plan: SweepPlan,
    out: Path,
    max_in_flight: Optional[int] = None,
    resume: bool = False,
    yes: bool = False,
    waits: bool = False,
) -> "SubmittedSweep":
    """Submit the missing runs of a sweep as jobs, and print a line for each.

    Args:
        max_in_flight: largest number of jobs of the sweep that wait or run at once; None for no limit.
        resume: whether failed runs are submitted again.
        yes: whether to submit without asking for confirmation on a terminal.
        waits: whether to wait until all jobs have ended: further runs are submitted as jobs end.

    Raises:
        UsageError: see :func:`fugaku_gpt.sweep.submit.submit_sweep`.
    """
    from fugaku_gpt.jobs.schedulers.commands import query_intervals
    from fugaku_gpt.sweep.refill import submit_to_the_end
    from fugaku_gpt.sweep.submit import RunStanding, is_due, submit_sweep

    is_confirmed = yes or not sys.stdin.isatty()

    def report_submission(number: int, total: int, planned: "PlannedJob", message: str) -> None:
        echo(f"[{number}/{total}] {planned.run.name}: {message}", err=True)

    def confirm_submission(planned: Sequence["PlannedJob"]) -> bool:
        nonlocal is_confirmed
        if planned and not is_confirmed:  # asked once, also if it waits and submits more
            is_confirmed = click.confirm(f"submit {total_text(planned)}?", err=True)
        return is_confirmed or not planned

    def submit(is_chosen: Callable[[RunStanding], bool]) -> "SubmittedSweep":
        return submit_sweep(
            plan,
            out,
            max_in_flight=max_in_flight,
            is_chosen=is_chosen,
            on_job=report_submission,
            confirm=confirm_submission,
        )

    if not waits:
        return submit(lambda standing: is_due(standing, resume))
    pauses = query_intervals()
    next(pauses)  # the first query is the submission itself
    return submit_to_the_end(submit, resume, pauses, time.sleep)


def total_text(planned: Sequence["PlannedJob"]) -> str:
    """The number of jobs and their node-hours, such as ``4 jobs, 2 node-hours``."""
    jobs = [planned_run.job for planned_run in planned if planned_run.job is not None]
    hours = [job.node_hours for job in jobs if job.node_hours is not None]
    text = f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}, {sum(hours):.4g} node-hours"
    endless = len(jobs) - len(hours)
    return text + (f" and {endless} without a time limit (job.elapse)" if endless else "")


def refusal_lines(submission: "SubmittedSweep") -> List[str]:
    """One line for each run whose job its scheduler has refused."""
    return [f"{name}: not submitted: {reason}" for name, reason in submission.refused.items()]


def follow_text(out: Path) -> str:
    """The command that shows what the runs in ``out`` are doing."""
    return f"to follow: fugaku-gpt sweep status {shlex.quote(str(out))}"
