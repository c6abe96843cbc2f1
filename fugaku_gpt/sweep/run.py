"""Runs a sweep on this machine, one run at a time; survives failures, can be stopped, and resumes missing runs.

A run's directory is ``OUT/<run>``. A run that ended well is not repeated. One that failed, timed out or ran out of
memory is not repeated either, unless failed runs are to be tried again; one that was interrupted, or refused (a corpus
was missing), is tried again. The files of an earlier attempt move to ``OUT/attempts/<run>/<number>``, so no retry hides
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, List, Optional, Protocol, Tuple

from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.launch_result import result_of_launch
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large
from fugaku_gpt.records.job import read_history
from fugaku_gpt.records.run import INTERRUPTED, LOST, OK, REFUSED, TIMEOUT, Result, RunDirectory
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
from fugaku_gpt.sweep.plan import SweepPlan, write_plan

Launch = Callable[..., Outcome]  # as fugaku_gpt.launch.launcher.launch


class SweepProgress(Protocol):
    """Reports the progress of a sweep."""

    def run_started(self, run: Run, number: int, total: int, directory: RunDirectory) -> None:
        """Reports that the ``number``-th of ``total`` runs begins."""

    def run_ended(self, run: Run, number: int, total: int, result: Result, is_earlier_result: bool) -> None:
        """Reports that a run has ended, now or in an earlier call (``is_earlier_result``)."""


@dataclass(frozen=True)
class EndedRun:
    """One run of the sweep and how it ended.

    Attributes:
        was_stopped: True if the sweep was stopped during this run, which may have ended all the same.
    """

    run: Run
    result: Result
    was_stopped: bool = False

    @property
    def has_failed(self) -> bool:
        """True if it is neither ok nor refused for its configuration (a refusal is a result and not a failure)."""
        return self.result.status != OK and self.run.config is not None


def run_sweep(
    sweep: Sweep,
    out: Path,
    launch: Launch,
    progress: SweepProgress,
    *,
    timeout: Optional[float] = None,
    retry_failed: bool = False,
    plan: Optional[SweepPlan] = None,
) -> List[EndedRun]:
    """Runs the missing runs. If the sweep is stopped, the list ends with the run during which it was stopped.

    Args:
        launch: starts the ranks of one run and waits for them; see :func:`fugaku_gpt.launch.launcher.launch`.
        timeout: seconds for each run, beside its own ``job.elapse``.
        plan: the plan of the sweep, to be recorded in ``out``.

    Raises:
        UsageError: another sweep runs in ``out``, or ``out`` holds other configurations under the same names.
    """
    with SweepLock(out) as lock:
        sweep = with_recorded_names(sweep, out)
        for run in sweep.runs:
            _refuse_submitted_run(out / run.name)
        if plan is not None:
            write_plan(out, plan)
        runs = LocalRuns(sweep.name, out, launch, lock.mark, timeout, retry_failed)
        ended: List[EndedRun] = []
        total = len(sweep.runs)
        for number, run in enumerate(sweep.runs, start=1):
            result = runs.reusable_result(run)
            is_earlier_result, stopped = result is not None, False
            if result is None:
                progress.run_started(run, number, total, runs.directory(run))
                result, stopped = runs.start(run)
            ended.append(EndedRun(run, result, stopped))
            progress.run_ended(run, number, total, result, is_earlier_result)
            if stopped:
                break
        return ended


def refuse_on_this_machine(config: RunConfig) -> None:
    """Refuses a run that does not fit this machine, or its own limit of memory, unless ``node.memory_check`` is off.

    Raises:
        UsageError: it does not fit.
    """
    refuse_too_large(config, local_node_limits(), range(config.layout.ranks))


@dataclass(frozen=True)
class LocalRuns:
    """Starts runs of one folder on this machine, one at a time, and records how each ended.

    Attributes:
        sweep: name of the sweep that they belong to.
        out: the folder, whose lock is held.
        launch: starts the ranks of one run and waits for them.
        mark: the mark of the lock, by which left-over ranks are found.
        timeout: seconds for each run, beside its own ``job.elapse``.
        retry_failed: whether runs that failed are started again.
        check: refuses a run before its ranks are started, by a UsageError.
    """

    sweep: str
    out: Path
    launch: Launch
    mark: str
    timeout: Optional[float] = None
    retry_failed: bool = False
    check: Callable[[RunConfig], None] = refuse_on_this_machine

    def directory(self, run: Run) -> RunDirectory:
        """The directory of a run."""
        return RunDirectory(self.out / run.name)

    def reusable_result(self, run: Run) -> Optional[Result]:
        """The recorded result if the run need not be repeated, else None."""
        return _reusable_result(run, self.directory(run), self.retry_failed)

    def start(self, run: Run) -> Tuple[Result, bool]:
        """Moves an earlier attempt aside and runs; returns the result, and whether this program was asked to stop."""
        directory = self.directory(run)
        move_attempt_aside(directory.path, attempts_of(self.out, run))
        started = steady_time()
        if run.config is None:
            return write_refused(self.sweep, run, directory, run.refusal, started), False
        write_entry(self.sweep, run, directory.path)
        directory.create(dump_run_config(run.config), self.mark)
        limits = [limit for limit in (self.timeout, run.config.job.elapse) if limit is not None]
        stopped = False
        try:
            self.check(run.config)
            outcome = self.launch(
                run.config,
                directory,
                timeout=min(limits) if limits else None,
                mark=self.mark,
            )
            result = result_of_launch(directory, run.config, outcome, directory.log_file, started)
            if result.is_resumable and outcome.stopped_by is None:
                # a run that met a time limit has a result; a run that was stopped is run again
                result = replace(result, status=TIMEOUT)
            stopped = outcome.stopped_by is not None or result.status == INTERRUPTED
        except UsageError as error:
            result = Result(REFUSED, first_line(str(error)), started, steady_time())
        directory.write_result(result)
        return result, stopped


def _refuse_submitted_run(directory: Path) -> None:
    """Refuses a run that was submitted as a job and has not ended.

    Raises:
        UsageError: a job of this directory may be waiting or running.
    """
    history = read_history(directory)
    if (history.jobs or history.open) and RunDirectory(directory).result() is None:
        raise UsageError(
            f"{directory}: was submitted as a job; see `fugaku-gpt sweep status {directory.parent}`, and resume it "
            "with `fugaku-gpt sweep resume`"
        )


def _reusable_result(run: Run, directory: RunDirectory, retry_failed: bool) -> Optional[Result]:
    """The recorded result if the run need not be repeated, else None."""
    result = directory.result()
    if result is None or result.status in (INTERRUPTED, LOST):  # lost: killed together with its sweep
        return None
    if result.status == REFUSED:  # cheap to try again, and its cause may be gone: a corpus was made, an error mended
        return None
    return None if retry_failed and result.status != OK else result
