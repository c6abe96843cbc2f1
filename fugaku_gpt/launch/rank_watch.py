"""Notices ranks on this machine that are gone while their launcher still waits for them.

A launcher that has lost a rank before that rank joined MPI waits for ever, and so do the other ranks. Most such ranks
are reported by their supervisor (:mod:`fugaku_gpt.launch.rank_supervisor`); this is for those that have none yet, as
where Python itself does not start, and for a launcher that lives on without ranks.
"""

from __future__ import annotations

import socket
import time
from typing import Callable, Dict, List, Optional, Set, Tuple

import psutil

from fugaku_gpt.launch.processes import marked_processes
from fugaku_gpt.machine.rank import launched_rank

# A launcher starts its ranks one after the other, and takes a moment to end when they have ended.
_GONE_SECONDS = 8.0
_POLL_SECONDS_BEFORE_JOINING, _POLL_SECONDS_AFTERWARDS = 1.0, 5.0


class RankWatch:
    """Compares the living ranks with those that should live.

    Args:
        mark: the mark of the launcher's processes (:mod:`fugaku_gpt.launch.processes`).
        ranks: number of ranks, all of them on this machine.
        has_joined: whether all ranks have joined MPI; from then on they end when they want to, but not all of them
            before their launcher.
    """

    def __init__(self, mark: str, ranks: int, has_joined: Callable[[], bool]) -> None:
        self._mark = mark
        self._ranks = ranks
        self._has_joined = has_joined
        self._next_poll = 0.0
        self._gone: Tuple[int, ...] = ()
        self._gone_since: Optional[float] = None
        self._stopped_since: Dict[str, float] = {}

    def gone_ranks(self) -> List[int]:
        """The ranks that have been gone for a while although the launcher waits for them; empty as long as all is well.
        Call it often: most calls look at nothing."""
        moment = time.monotonic()
        if moment < self._next_poll:
            return []
        joined = self._has_joined()
        self._next_poll = moment + (_POLL_SECONDS_AFTERWARDS if joined else _POLL_SECONDS_BEFORE_JOINING)
        living = living_ranks(self._mark)
        gone = tuple(rank for rank in range(self._ranks) if rank not in living)
        if joined and living:
            gone = ()
        if gone != self._gone:
            self._gone, self._gone_since = gone, moment
        if not gone or self._gone_since is None or moment - self._gone_since < _GONE_SECONDS:
            return []
        return list(gone)

    def stopped_launcher(self, moment: float) -> str:
        """The process of the launcher that has been stopped (SIGSTOP) for a while, such as ``mpirun (process 17)``;
        empty if there is none. Ranks that are stopped are named by those that wait for them."""
        names = stopped_launchers(self._mark)
        self._stopped_since = {name: self._stopped_since.get(name, moment) for name in names}
        return next((name for name, since in self._stopped_since.items() if moment - since >= _GONE_SECONDS), "")

    def reason(self) -> str:
        """Return the reason to end the launch: which ranks are gone, or which process of the launcher is stopped. Empty
        as long as all is well."""
        moment = time.monotonic()
        if moment >= self._next_poll:
            stopped = self.stopped_launcher(moment)
            if stopped:
                return f"{stopped} on {socket.gethostname()} is stopped (SIGSTOP), and its ranks would wait for it"
        gone = self.gone_ranks()
        if not gone:
            return ""
        if self._has_joined():
            return f"no rank lives on {socket.gethostname()}, but their launcher does"
        names = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}"
        return f"{names} on {socket.gethostname()} ended before {'it' if len(gone) == 1 else 'they'} joined MPI"


def living_ranks(mark: str) -> Set[int]:
    """The ranks of which a process with this mark lives."""
    ranks = set()
    for process in marked_processes(mark):
        try:
            launched = launched_rank(process.environ())
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
        if launched is not None:
            ranks.add(launched.rank)
    return ranks


def stopped_launchers(mark: str) -> List[str]:
    """The processes with this mark that are stopped and are no ranks: ``mpirun`` and its helpers."""
    names = []
    for process in marked_processes(mark):
        try:
            if process.status() == psutil.STATUS_STOPPED and launched_rank(process.environ()) is None:
                names.append(f"{process.name()} (process {process.pid})")
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
    return names
