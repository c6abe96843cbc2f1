"""Sweeps: many runs from one file, run on this machine or submitted as jobs, and the table of their results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.api.settings import FilePath, Settings, setting_texts
from fugaku_gpt.api.stopping import WatchedLaunch, pass_on_signal
from fugaku_gpt.api.tables import data_frame
from fugaku_gpt.errors import missing_package
from fugaku_gpt.jobs.schedulers.commands import query_intervals
from fugaku_gpt.launch.launcher import find_launcher, require_rank_packages
from fugaku_gpt.records.run import Result, RunDirectory
from fugaku_gpt.report.collect import collect_rows
from fugaku_gpt.report.notes_table import notes_tables
from fugaku_gpt.report.rows import ResultRow, values_of_rows
from fugaku_gpt.sweep.expand import Run as SweepRun
from fugaku_gpt.sweep.folder import with_recorded_names
from fugaku_gpt.sweep.plan import plan_of
from fugaku_gpt.sweep.refill import submit_to_the_end
from fugaku_gpt.sweep.run import EndedRun, run_sweep
from fugaku_gpt.sweep.submit import RunStanding, SubmittedSweep, is_due, run_standings, submit_sweep

__all__ = ["EndedRun", "RunStanding", "SubmittedSweep", "Sweep", "SweepRun", "Table"]


@dataclass(frozen=True)
class Table:
    """The results of runs, as ``fugaku-gpt report table`` has them.

    Attributes:
        configurations: one row for each configuration, the medians over its repeats.
        runs: one row for each run.
    """

    configurations: Tuple[ResultRow, ...]
    runs: Tuple[ResultRow, ...]

    @classmethod
    def of(cls, *directories: FilePath) -> "Table":
        """The table of run directories, and of the runs in folders; nothing is written.

        Raises:
            UsageError: a path holds no run, or the only run is damaged; among several a damaged one is a row of status
                ``unreadable``.
        """
        configurations, runs = collect_rows([Path(directory) for directory in directories], is_read_only=True)
        return cls(tuple(configurations), tuple(runs))

    @property
    def markdown(self) -> str:
        """The table in the form of the notes."""
        return notes_tables(self.configurations)

    def rows(self, *, repeats: bool = False) -> List[Dict[str, Any]]:
        """Raw values with units in their names; of each run with ``repeats``, else of each configuration."""
        return values_of_rows(self.runs if repeats else self.configurations)

    def to_pandas(self, *, repeats: bool = False) -> Any:
        """``rows`` as a ``pandas.DataFrame``.

        Raises:
            UsageError: pandas is not installed.
        """
        rows = self.rows(repeats=repeats)
        return data_frame(rows, list(rows[0]) if rows else ())

    def _repr_markdown_(self) -> str:
        return self.markdown


class Sweep:
    """A sweep file and the folder of its runs.

    Attributes:
        file: the sweep file.
        out: the folder for run directories.
    """

    def __init__(self, file: FilePath, out: FilePath, *, settings: Settings = ()) -> None:
        """Expand a sweep file; nothing is started or written.

        Args:
            settings: settings over every row.

        Raises:
            ConfigError: it is no valid sweep, or no row of it can be run.
        """
        self.file, self.out = Path(file), Path(out)
        self._plan = plan_of(self.file, setting_texts(settings))
        self._sweep = self._plan.sweep()

    def __repr__(self) -> str:
        return f"Sweep({str(self.file)!r}, {str(self.out)!r}, {len(self.runs)} runs)"

    @property
    def name(self) -> str:
        """The name of the sweep."""
        return self._sweep.name

    @property
    def runs(self) -> Tuple[SweepRun, ...]:
        """The runs in the order in which they are run; those that are not valid have a refusal, and no config."""
        return self._sweep.runs

    def run(
        self,
        *,
        timeout: Optional[float] = None,
        retry_failed: bool = False,
        on_end: Callable[[SweepRun, Result], None] = lambda run, result: None,
    ) -> List[EndedRun]:
        """Run what is missing on this machine, one run at a time, as ``fugaku-gpt sweep run`` does.

        A run that fails is a row of the table, and no error. Ctrl-C and SIGTERM stop the sweep; when the ranks have
        ended, the program gets the signal itself, as in ``train``. The same call continues.

        Args:
            timeout: seconds for each run; default: no limit.
            retry_failed: whether failed runs are run again.
            on_end: called with each run that has ended, and its result.

        Raises:
            UsageError: ranks cannot be started here, or the folder holds other runs.
            KeyboardInterrupt: it was stopped by Ctrl-C.
        """
        find_launcher()  # both fail before anything is written, and say how to get what is missing
        try:
            require_rank_packages()
        except ModuleNotFoundError as error:
            raise missing_package(error) or error from None
        progress, plan, start = _Progress(on_end), self._plan, WatchedLaunch()
        ended = run_sweep(self._sweep, self.out, start, progress, timeout=timeout, retry_failed=retry_failed, plan=plan)
        pass_on_signal(start.stopped_by)
        return ended

    def submit(
        self, *, max_in_flight: Optional[int] = None, resume: bool = False, wait: bool = False
    ) -> SubmittedSweep:
        """Submit what is missing as jobs, as ``fugaku-gpt sweep submit`` does.

        Args:
            max_in_flight: largest number of jobs of the sweep that wait or run at once; default: no limit.
            resume: whether failed runs are submitted again.
            wait: whether to return only when all jobs have ended; further ones are submitted as jobs end.

        Returns:
            The ids of the jobs, the runs that were refused, and why a scheduler was not asked further.

        Raises:
            UsageError: another submission is under way, the folder holds other runs, or the jobs lack something.
        """

        def submit(is_chosen: Callable[[RunStanding], bool]) -> SubmittedSweep:
            return submit_sweep(self._plan, self.out, max_in_flight=max_in_flight, is_chosen=is_chosen)

        if not wait:
            return submit(lambda standing: is_due(standing, resume))
        pauses = query_intervals()
        next(pauses)  # the first query is the submission itself
        return submit_to_the_end(submit, resume, pauses, time.sleep)

    def status(self, *, ask: bool = True) -> Sequence[RunStanding]:
        """The state of every run: missing, waiting, running, or how and why it ended.

        Args:
            ask: whether schedulers are asked, once for all jobs; else what is recorded.

        Raises:
            UsageError: a record in a run directory is damaged.
        """
        return run_standings(with_recorded_names(self._sweep, self.out), self.out, query_schedulers=ask)

    def table(self) -> Table:
        """The results of the runs that are in the folder.

        Raises:
            UsageError: there is none yet, or a record is damaged.
        """
        return Table.of(self.out)


class _Progress:
    """Hands the ends of runs to a caller."""

    def __init__(self, on_end: Callable[[SweepRun, Result], None]) -> None:
        self._on_end = on_end

    def run_started(self, run: SweepRun, number: int, total: int, directory: RunDirectory) -> None:
        """Report nothing: only ends are reported."""

    def run_ended(self, run: SweepRun, number: int, total: int, result: Result, is_earlier_result: bool) -> None:
        """Report a run that has ended, now or before."""
        self._on_end(run, result)
