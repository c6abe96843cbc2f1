"""How ranks ended that could not report it themselves, by what MPICH's and Open MPI's launchers print about them."""

from __future__ import annotations

import os
import re
import socket
from typing import Callable, List, Optional, Sequence, Tuple

from fugaku_gpt.errors import EXIT_USAGE
from fugaku_gpt.machine.signals import signal_name

PRINT_STATUSES = "-print-all-exitcodes"  # MPICH's option that makes its launcher print a line of statuses at its end
# all ranks are on one host, in their order
_STATUSES = re.compile(r"^\[mpiexec@\S+\] Exit codes: \[[^\]]*\] ([\d,]+)\s*$")
# of Open MPI's runtimes up to 4 and from 5 on: the process that failed first, as [[5436,1],1] or [prterun-host-99@1,1]
_FAILED = re.compile(r"^\s*Process name: \[\S*,(\d+)\]")
# MPICH's launcher has lost the connection to its only helper on this machine, whose children the ranks are
_LOST_PROXY = re.compile(r"^\[mpiexec@\S+\] control_cb .*assert \(!closed\) failed")
_EXIT_CODE = re.compile(r"^\s+(?:Process name: \S+ )?Exit code:\s+(\d+)\s*$")
_KILLED = re.compile(
    r"^(?:mpirun|prterun) noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
)


class RankEndings:
    """Reads the lines of a launcher; the line of statuses is not passed on.

    Attributes:
        statuses: the status of each rank as of ``wait``, in the order of ranks; empty as long as none is printed.
        first: the rank whose end made Open MPI's launcher end all others, and its status; None if there is none.
        has_lost_proxy: whether MPICH's launcher has lost the helper that starts the ranks.
    """

    def __init__(self, on_line: Optional[Callable[[str], None]] = None) -> None:
        self.statuses: List[int] = []
        self.first: Optional[Tuple[int, int]] = None
        self.has_lost_proxy = False
        self._failed_rank: Optional[int] = None
        self._on_line = on_line

    def read(self, line: str) -> None:
        """Read one line of the launcher's output, and give it to ``on_line``."""
        statuses = _STATUSES.match(line)
        if statuses is not None:
            self.statuses = [int(text) for text in statuses[1].split(",")]
            return
        self.has_lost_proxy = self.has_lost_proxy or _LOST_PROXY.match(line) is not None
        failed, code, killed = (pattern.match(line) for pattern in (_FAILED, _EXIT_CODE, _KILLED))
        if failed is not None:
            self._failed_rank = int(failed[1])
        if code is not None and self._failed_rank is not None:
            self.first = self._failed_rank, int(code[1]) << 8
        if killed is not None:
            self.first = int(killed[1]), int(killed[2])
        if self._on_line is not None:
            try:
                self._on_line(line)
            except (OSError, ValueError):  # such as the terminal, which is gone; endings are still read
                self._on_line = None

    def reason(self, ranks: Sequence[int]) -> str:
        """Return a sentence that these ranks ended before they joined MPI, with their statuses where they are known."""
        statuses = [self.statuses[rank] for rank in ranks if rank < len(self.statuses)]
        return _sentence(ranks, statuses if len(statuses) == len(ranks) else [])

    def reason_of_first(self, exit_code: int) -> str:
        """Return the sentence about the rank whose end made the launcher end all others; empty if none is known, or if
        it has refused a mistake of the user's, which it has printed.

        Args:
            exit_code: exit code of the launcher; that of MPICH is the number of the signal that killed the rank.
        """
        if exit_code == EXIT_USAGE:
            return ""
        if self.first is not None:
            return _sentence([self.first[0]], [self.first[1]])
        killed = self._killed_by(exit_code)
        # of several, the launcher has killed all but one, and the process that it prints is the first in their order
        return _sentence(killed if len(killed) == 1 else [], [exit_code]) if killed else ""

    def _killed_by(self, status: int) -> List[int]:
        """The ranks that MPICH's launcher has reported with the status of a signal."""
        return [rank for rank, other in enumerate(self.statuses) if other == status and os.WIFSIGNALED(status)]

    def reason_of_supervisor(self, exit_code: int) -> str:
        """Return the sentence about the supervisor of a rank that was ended by a signal, so that nobody was left to
        record the end of its rank; empty if the launcher has reported no such end.

        Args:
            exit_code: as in :meth:`reason_of_first`.
        """
        if any(status and not os.WIFSIGNALED(status) for status in self.statuses):
            return ""  # a rank has ended first, as its supervisor has printed, and the launcher has killed the others
        number, ranks = 0, self._killed_by(exit_code)
        if self.first is not None and os.WIFSIGNALED(self.first[1]):
            number, ranks = os.WTERMSIG(self.first[1]), [self.first[0]]
        elif ranks:
            number = os.WTERMSIG(exit_code)
        if not number:
            return ""
        whose = f"rank {ranks[0]}" if len(ranks) == 1 else "a rank"
        which = "" if len(ranks) == 1 else "; which one is not known, as the launcher has killed all others alike"
        return (
            f"the supervisor of {whose} on {socket.gethostname()} was killed by signal {number} "
            f"({signal_name(number)}), and its rank with it{which}"
        )


def _sentence(ranks: Sequence[int], statuses: Sequence[int]) -> str:
    """Name ranks that ended before they joined MPI; without a number, it is some rank."""
    names = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "a rank"
    how = f" ({', '.join(dict.fromkeys(map(describe_status, statuses)))})" if statuses else ""
    return f"{names} on {socket.gethostname()} ended{how} before {'they' if len(ranks) > 1 else 'it'} joined MPI"


def describe_status(status: int) -> str:
    """Name the exit code or the signal of a status as of ``wait``."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}, {signal_name(os.WTERMSIG(status))}"
    return f"exit code {os.WEXITSTATUS(status)}"
