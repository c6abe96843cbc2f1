"""Follows runs and their jobs for a terminal; of files what was appended is read, and schedulers are asked rarely.

::

    dashboard = Dashboard(paths)
    with dashboard:
        while ...:
            dashboard.look()
            for run, status in dashboard.statuses():
                ...
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple, Type

from fugaku_gpt.errors import FugakuGptError, UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.jobs.poll import PolledRun, poll_runs, watch_polls
from fugaku_gpt.jobs.schedulers.commands import MAX_WAIT_SECONDS
from fugaku_gpt.jobs.store import UNFINISHED
from fugaku_gpt.launch.lost_run import conclude_lost_runs
from fugaku_gpt.limits import cut
from fugaku_gpt.records.job import JOB_FILE
from fugaku_gpt.report.page_runs import MOST_RUNS_FOLLOWED, PageRun, named_runs
from fugaku_gpt.report.run_status import RunStatus, status_of

_DISCOVERY_SECONDS = 5.0  # between two searches of folders that have not changed themselves
Poll = Callable[[Sequence[Path]], List[PolledRun]]


class Dashboard:
    """The runs in folders, which may appear, grow, end, be resumed and be removed.

    Args:
        poll: asks schedulers for the jobs of run directories.
        clock: a monotonic time in seconds.

    Raises:
        UsageError: a folder does not exist.
    """

    def __init__(
        self, paths: Sequence[Path], poll: Poll = poll_runs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        for path in paths:
            if not path.is_dir():
                raise UsageError(f"{path}: no such folder; give a run directory, or a folder of run directories")
        self._paths, self._clock = list(paths), clock
        self._runs: Dict[Path, PageRun] = {}
        self._count = 0
        self._next_discovery = clock()
        self._changed: List[Optional[int]] = []
        self._jobs = JobPoller(poll, clock)

    def __enter__(self) -> "Dashboard":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._jobs.close()

    @property
    def problem(self) -> str:
        """Why jobs are not followed; empty if they are."""
        return self._jobs.problem

    @property
    def note(self) -> str:
        """How many runs are left out; empty if none is."""
        most = MOST_RUNS_FOLLOWED
        return f"{most:,} of {self._count:,} runs are followed" if self._count > most else ""

    def look(self) -> None:
        """Read what has changed since the last call."""
        changed = [_time_of(path) for path in self._paths]
        if changed != self._changed or self._clock() >= self._next_discovery:
            self._discover()
            self._changed, self._next_discovery = changed, self._clock() + _DISCOVERY_SECONDS
        for path, run in list(self._runs.items()):
            while run.poll():
                pass
            if run.have_facts_changed() and not run.read_facts():
                del self._runs[path]

    def statuses(self) -> List[Tuple[PageRun, RunStatus]]:
        """Each run with its status, by name."""
        return [(run, status_of(run, self._jobs.newest.get(path))) for path, run in self._runs.items()]

    def _discover(self) -> None:
        try:
            every_run = list(named_runs(self._paths, lambda _: None).items())
        except OSError:  # a folder that is just being removed, or that cannot be read now: the next look tries again
            return
        self._count, named = len(every_run), every_run[:MOST_RUNS_FOLLOWED]
        self._runs = {path: self._runs.get(path) or PageRun(path, name) for path, name in named}
        conclude_lost_runs(path for path, run in self._runs.items() if run.record.status == UNFINISHED)
        self._jobs.follow([path for path in self._runs if (path / JOB_FILE).exists()])


class JobPoller:
    """Follows jobs in a thread of its own, since a scheduler may take a minute to answer.

    Each scheduler is asked once for all jobs, at the intervals of ``job watch``, and no longer than there is a job that
    can change.

    Attributes:
        newest: what was answered last, by run directory.
        problem: why the jobs are not followed any more; empty if they are, or need not be.
    """

    def __init__(self, poll: Poll = poll_runs, clock: Callable[[], float] = time.monotonic) -> None:
        self.newest: Dict[Path, PolledRun] = {}
        self.problem = ""
        self._poll_runs = poll
        self._directories: FrozenSet[Path] = frozenset()
        self._clock, self._next_start = clock, clock()
        self._last_states: Dict[Path, Optional[int]] = {}
        self._is_closed = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def follow(self, directories: Sequence[Path]) -> None:
        """Follow the jobs of these run directories from now on."""
        self._directories = frozenset(directories)
        is_following = self._thread is not None and self._thread.is_alive()
        if is_following or not directories or self._clock() < self._next_start or self._states() == self._last_states:
            return
        self._thread = threading.Thread(target=self._follow, name="job poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no scheduler any more. A query that is under way ends by itself."""
        self._is_closed.set()

    def _follow(self) -> None:
        try:
            for polled in watch_polls(self._poll, self._sleep):
                self.newest = {run.directory: run for run in polled}
                self.problem = ""
            self._last_states = self._states()  # all are over, until a job is submitted again
        except _Closed:
            pass
        except (FugakuGptError, OSError) as error:
            self.problem = harmless(cut(f"jobs are not followed: {error}"))
            self._next_start = self._clock() + MAX_WAIT_SECONDS

    def _poll(self) -> List[PolledRun]:
        return self._poll_runs(sorted(self._directories))

    def _states(self) -> Dict[Path, Optional[int]]:
        """When the records of the jobs have changed last."""
        return {path: _time_of(path / JOB_FILE) for path in self._directories}

    def _sleep(self, seconds: float) -> None:
        if self._is_closed.wait(seconds):
            raise _Closed


def _time_of(path: Path) -> Optional[int]:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class _Closed(Exception):
    """The poller was closed."""
