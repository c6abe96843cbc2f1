"""Notices ranks on this machine that are gone while their launcher still waits for them.

A launcher that has lost a rank before that rank joined MPI waits for ever, and so do the other ranks. Most such ranks
are reported by their supervisor (:mod:`fugaku_gpt.launch.rank_supervisor`); this is for those that have none yet, as
where Python itself does not start, and for a launcher that lives on without ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Callable, Dict, List, Optional, Tuple

import psutil

from fugaku_gpt.launch.processes import marked_processes
from fugaku_gpt.launch.rank_supervisor import SUPERVISOR_NAME
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.machine.system import this_system

# A launcher starts its ranks one after the other, and takes a moment to end when they have ended.
_GONE_SECONDS = 8.0
# A rank whose process was never seen may not have been started yet, as where programs come from a slow file system.
_NEVER_SEEN_SECONDS = 600.0
_CHILDREN_FAULTS = 8  # field `cminflt` of /proc/PID/stat, counted from the process's state
_PROXY = "hydra_pmi_proxy"  # of MPICH, whose only children are the ranks of this machine
_POLL_SECONDS_BEFORE_JOINING, _POLL_SECONDS_AFTERWARDS = 1.0, 5.0


class RankWatch:
    """Compares the living ranks with those that should live.

    Args:
        mark: the mark of the launcher's processes (:mod:`fugaku_gpt.launch.processes`).
        ranks: number of ranks, all of them on this machine.
        has_joined: whether all ranks have joined MPI; from then on they end when they want to, but not all of them
            before their launcher.

    Attributes:
        ranks_of_processes: the rank of each process number that was seen so far.
        gone: the ranks that were gone for a while although the launcher waited for them.
        stopped: the process of the launcher, or the supervisor of a rank, that was stopped (SIGSTOP) for a while, such
            as ``mpirun (process 17)``; or empty. Ranks that are stopped are named by those that wait for them.
    """

    def __init__(self, mark: str, ranks: int, has_joined: Callable[[], bool]) -> None:
        self._mark = mark
        self._ranks = ranks
        self._has_joined = has_joined
        self.ranks_of_processes: Dict[int, int] = {}
        self.gone: List[int] = []
        self._next_poll = 0.0
        self._missing: Tuple[int, ...] = ()
        self._missing_since: Optional[float] = None
        self.stopped = ""
        self._stopped_since: Dict[str, float] = {}

    def has_lost_ranks(self) -> bool:
        """Whether ranks have been gone for a while although the launcher waits for them, or the launcher is stopped.

        Then the launch is to be ended; ranks that live beside lost ones are killed here. Call it often: most calls look
        at nothing.
        """
        moment = time.monotonic()
        if moment < self._next_poll:
            return False
        joined = self._has_joined()
        self._next_poll = moment + (_POLL_SECONDS_AFTERWARDS if joined else _POLL_SECONDS_BEFORE_JOINING)
        self.stopped = self._stopped_launcher(moment)
        if self.stopped:
            return True
        processes = ranks_of_processes(self._mark)
        self.ranks_of_processes.update(processes)
        living, seen = set(processes.values()), set(self.ranks_of_processes.values())
        missing = tuple(rank for rank in range(self._ranks) if rank not in living)
        if joined and living:
            missing = ()
        if missing != self._missing:
            self._missing, self._missing_since = missing, moment
        if not missing or self._missing_since is None or moment - self._missing_since < _GONE_SECONDS:
            return False
        is_unseen = not joined and not seen.intersection(missing) and not has_reaped_rank(self._mark)
        if is_unseen and moment - self._missing_since < _NEVER_SEEN_SECONDS:
            return False
        self.gone = list(missing)
        for process in processes:  # so that the launcher ends, and prints how each rank ended
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(process, signal.SIGKILL)
        return True

    def _stopped_launcher(self, moment: float) -> str:
        """The process of the launcher that has been stopped for a while; empty if there is none."""
        names = stopped_launchers(self._mark)
        self._stopped_since = {name: self._stopped_since.get(name, moment) for name in names}
        return next((name for name, since in self._stopped_since.items() if moment - since >= _GONE_SECONDS), "")


def ranks_of_processes(mark: str) -> Dict[int, int]:
    """The ranks of the living processes with this mark, by process number; a rank may have several."""
    ranks = {}
    for process in marked_processes(mark):
        try:
            launched = launched_rank(process.environ())
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
        if launched is not None:
            ranks[process.pid] = launched.rank
    return ranks


def has_reaped_rank(mark: str) -> bool:
    """Whether a rank has ended that the launcher with this mark had started, though it may never have been seen: the
    kernel counts the memory accesses of children that have been waited for. The launcher is the parent of a living
    rank (Open MPI's ``mpirun``), or MPICH's proxy."""
    names_of_others: Dict[int, str] = {}
    parents = set()
    for process in marked_processes(mark):
        try:
            if launched_rank(process.environ()) is None:
                names_of_others[process.pid] = process.name()
            else:
                parents.add(process.ppid())
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
    for number, name in names_of_others.items():
        text = this_system().read(f"proc/{number}/stat") if name == _PROXY or number in parents else None
        fields = text.rpartition(")")[2].split() if text is not None else []
        if len(fields) > _CHILDREN_FAULTS and fields[_CHILDREN_FAULTS] != "0":
            return True
    return False


def stopped_launchers(mark: str) -> List[str]:
    """The processes with this mark that are stopped and are no ranks: ``mpirun``, its helpers, and supervisors."""
    names = []
    for process in marked_processes(mark):
        try:
            if process.status() != psutil.STATUS_STOPPED:
                continue
            launched, name = launched_rank(process.environ()), process.name()
            if launched is None:
                names.append(f"{name} (process {process.pid})")
            elif name == SUPERVISOR_NAME:
                names.append(f"the supervisor of rank {launched.rank} (process {process.pid})")
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
    return names
