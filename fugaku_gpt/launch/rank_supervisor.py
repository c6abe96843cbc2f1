"""Supervises a rank: under a launcher, each rank is the child of a process that does nothing but wait for it.

An MPI launcher that loses a rank kills the others within milliseconds and reports at most a process number. The
supervisor learns from the kernel which signal ended its rank, records that in the run directory while the launcher
still believes that all is well, and only then exits with the rank's exit code. The supervisor of rank 0 prints on its
standard error what any rank has recorded. A supervisor that is killed takes its rank with it; it forwards the signals
that it gets.

A rank that ends before it has joined MPI leaves the others in ``MPI_Init``: MPICH's launcher ends them only if a rank
asks for it or is killed by a signal, whatever the exit code. So the supervisor asks for it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import signal
import socket
import stat
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Dict, List, NoReturn, Optional, Set, Union

from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, EXIT_USAGE, UsageError
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.machine.local import out_of_memory_kills
from fugaku_gpt.machine.shared_memory import SHARED_MEMORY, bus_error_cause, remove_segments, segments_of
from fugaku_gpt.machine.signals import signal_name
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.files import locked
from fugaku_gpt.records.run import (
    FAILED,
    HUNG,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    SUMMARY_SECONDS,
    Result,
    RunDirectory,
    failure_lines,
)

SUPERVISOR_NAME = "rank-supervisor"  # of the process, as the kernel has it: at most 15 characters
_POLL_SECONDS = 0.2
_PARENT_POLL_SECONDS = 2.0
# for rank 0 to report a mistake that all ranks refuse, since they have the same command line, and to end them
_RANK_0_SECONDS = 15.0
_ABORT_SECONDS = 5.0
# for a launcher to read what a rank has printed, and to print it
_READERS_SECONDS, _UNREAD_POLL_SECONDS, _PASSED_ON_SECONDS = 5.0, 0.01, 0.5
# within which ranks that are killed together are noticed, on a busy node too; before that no launcher learns of it
_TOGETHER_SECONDS = 2.0
_MOST_NAMED_RANKS = 8
_KILLED = re.compile(r"ranks? (\d+(?:, \d+)*): killed by signal ")
# MPICH's launcher, which sets the first, ends all ranks when one is killed by a signal, but not for an exit code.
# Slurm, which sets both with PMI-2, looks at exit codes alone, and so do Open MPI, Fujitsu's MPI and others.
_VARIABLE_OF_MPICH, _VARIABLE_OF_SLURM = "PMI_RANK", "SLURM_STEP_ID"
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # from linux/prctl.h


class SupervisorLink:
    """The pipe through which a rank reports to its supervisor.

    Attributes:
        has_joined: whether it has reported that it has joined MPI.
    """

    def __init__(self, pipe: int) -> None:
        self.has_joined = False
        self._pipe = pipe

    def report_joined(self) -> None:
        """Report that this rank has joined MPI with all others: from here on the launcher notices its end."""
        self.has_joined = True
        self._report({"joined": True})

    def report_directory(self, directory: Path) -> None:
        """Report the run directory."""
        self._report({"directory": str(directory.absolute())})

    def _report(self, message: Dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, json.dumps(message).encode() + b"\n")


def supervise_rank(rank: int, directory: Optional[Path] = None) -> SupervisorLink:
    """Continue as a child of this process, which from then on waits for the child and exits as it does.

    Call it before there are threads and before MPI is initialised. Returns, in the child, the link to the supervisor.

    Args:
        directory: the run directory, where it is known before the ranks have joined MPI.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    started, supervisor, launcher = steady_time(), os.getpid(), os.getppid()
    pipe_read, pipe_write = os.pipe()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS)  # until it can forward them
    child = os.fork()
    if child:
        os.close(pipe_write)
        code = 1
        try:
            code = _RankSupervisor(rank, child, pipe_read, started, launcher, directory).wait(previous_mask)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    os.close(pipe_read)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # the supervisor has just been killed
        os._exit(128 + signal.SIGKILL)
    return SupervisorLink(pipe_write)


def refuse_on_one_rank(rank: int, error: UsageError) -> NoReturn:
    """End a supervised rank other than rank 0 for a mistake of the user's, before it has joined MPI; its supervisor
    ends the others. Rank 0, which has the same command line, reports a mistake that all ranks refuse, and ends all."""
    time.sleep(_RANK_0_SECONDS)
    print_refusal(rank, error)
    raise SystemExit(EXIT_RUN_FAILED)


def refuse_launch(rank: int, error: UsageError) -> NoReturn:
    """End all ranks of a launch for a mistake of the user's, before they have joined MPI.

    All ranks have the same command line, so that rank 0 reports it, with the exit code of a usage error. A rank that
    still lives after a while is the only one that refuses, as where its node does not see a file: it has failed.
    """
    is_only_one = rank != 0
    if is_only_one:
        time.sleep(_RANK_0_SECONDS)
    print_refusal(rank if is_only_one else None, error)
    end_launch(EXIT_RUN_FAILED if is_only_one else EXIT_USAGE, may_signal=is_only_one)


def print_refusal(rank: Optional[int], error: UsageError) -> None:
    """Print why a rank does not join MPI.

    Args:
        rank: the rank whose node the mistake is of; None for one that all ranks share.
    """
    who = f"rank {rank} on {socket.gethostname()}: " if rank is not None else ""
    for line in str(error).splitlines():
        print(f"fugaku-gpt: {who}{line}", file=sys.stderr, flush=True)


def end_launch(code: int, *, may_signal: bool = True) -> NoReturn:
    """End this process, and all other ranks of its launch, which may be waiting for it in ``MPI_Init``.

    Args:
        code: the exit code for the launcher to end with, not 0.
        may_signal: whether to end by a signal where MPICH's launcher does not notice the exit code; False where all
            ranks end anyway, since job scripts read the code.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    _wait_for_readers()
    connection = os.environ.get("PMI_FD", "")
    if connection.isdecimal():  # MPICH and Slurm: PMI-1's command `abort`
        with contextlib.suppress(OSError):
            os.write(int(connection), f"cmd=abort exitcode={code}\n".encode())
            time.sleep(_ABORT_SECONDS)  # until the launcher ends this process
    if may_signal and _VARIABLE_OF_MPICH in os.environ and _VARIABLE_OF_SLURM not in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(code)


def _wait_for_readers() -> None:
    """Wait until the launcher has read what this process has printed: it ends at once when a rank asks for it, and what
    it has not passed on by then is lost."""
    deadline = steady_time() + _READERS_SECONDS
    for file in (1, 2):
        with contextlib.suppress(OSError):  # it is closed, or has no such count
            while stat.S_ISFIFO(os.fstat(file).st_mode) and unread_bytes(file) and steady_time() < deadline:
                time.sleep(_UNREAD_POLL_SECONDS)
    time.sleep(_PASSED_ON_SECONDS)


def unread_bytes(pipe: int) -> int:
    """Return the number of bytes that a pipe holds, by either of its ends; raises ``OSError`` for what has no such
    number."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


class _RankSupervisor:
    def __init__(
        self, rank: int, child: int, pipe: int, started: float, launcher: int, directory: Optional[Path] = None
    ) -> None:
        self._rank = rank
        self._child = child
        self._pipe = pipe
        self._started = started
        self._has_joined = False
        self._directory = RunDirectory(directory) if directory is not None else None
        self._forwarded: List[int] = []
        self._has_printed_failure = False
        self._parent = launcher  # as it was before the fork: it may have died since
        self._parent_name = _name_of(launcher)
        self._segments: Set[Path] = set()  # in shared memory, of the rank's MPI
        self._wakeup_read, self._wakeup_write = os.pipe()

    def wait(self, mask: Set[Union[int, signal.Signals]]) -> int:
        """Wait until the rank has ended; returns the exit code to exit with.

        Args:
            mask: the signal mask that is restored once signals can be forwarded.
        """
        _prctl(_PR_SET_NAME, ctypes.c_char_p(SUPERVISOR_NAME.encode()))
        # a signal just before `select` would go unnoticed until that returns, so signals write to a pipe
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for forwarded in _FORWARDED_SIGNALS:
            if signal.getsignal(forwarded) is not signal.SIG_IGN:
                signal.signal(forwarded, self._forward)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        kills_before = out_of_memory_kills()
        while not self._pipe_has_closed():
            self._print_recorded_failure()
            if os.getppid() != self._parent:
                self._end_without_launcher()
        _, status = os.waitpid(self._child, 0)
        ended = steady_time()
        if status != 0:  # a rank that has ended well has removed its own
            remove_segments(self._segments)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            self._record(self._result(number, ended, out_of_memory_kills() > kills_before))
            if not self._has_joined:
                end_launch(128 + number if number in self._forwarded else EXIT_RUN_FAILED)
            return 128 + number
        code = os.WEXITSTATUS(status)
        if not self._has_joined:
            self._end_before_joining(code, ended)
        if code not in (EXIT_OK, EXIT_RESUME):
            self._print_recorded_failure()
            self._wait_for_summary_of_rank_0()
        return code

    def _pipe_has_closed(self) -> bool:
        """Wait for the rank's end, for its run directory, or for the next check of the result and of the launcher; True
        at its end."""
        polls_result = self._rank == 0 and self._directory is not None and not self._has_printed_failure
        seconds = _POLL_SECONDS if polls_result else _PARENT_POLL_SECONDS
        ready, _, _ = select.select([self._pipe, self._wakeup_read], [], [], seconds)
        if self._wakeup_read in ready:
            os.read(self._wakeup_read, 4096)
        return self._pipe in ready and not self._read_reports()

    def _read_reports(self) -> bool:
        """Read what the rank has reported; False once it has ended."""
        text = os.read(self._pipe, 65536)
        for line in text.splitlines():
            message = json.loads(line)
            self._has_joined = self._has_joined or "joined" in message
            if self._has_joined:  # all ranks of this node have opened them by now
                self._segments.update(segments_of(self._child))  # a dead rank, whose report is read late, has none
            if "directory" in message:
                self._directory = RunDirectory(Path(message["directory"]))
        return bool(text)

    def _end_before_joining(self, code: int, ended: float) -> NoReturn:
        """Record that the rank has ended before it joined MPI, and end all others."""
        if code == EXIT_USAGE and self._rank == 0:  # it has reported what the user must mend
            end_launch(code, may_signal=False)
        if code == EXIT_USAGE:
            time.sleep(_RANK_0_SECONDS)  # rank 0 refuses the same, or else only this rank does
        reason = f"rank {self._rank} on {socket.gethostname()} ended (exit code {code}) before it joined MPI"
        self._record(
            Result(
                status=FAILED,
                reason=reason,
                started=self._started,
                ended=ended,
                rank=self._rank,
                node=socket.gethostname(),
                exception=f"exit code {code}",
            )
        )
        end_launch(EXIT_RUN_FAILED)

    def _end_without_launcher(self) -> NoReturn:
        """Record that the process of the launcher that has started this rank is gone, and end the rank: what is left of
        the launcher, and the ranks of other nodes, may wait for it for ever."""
        while select.select([self._pipe], [], [], 0)[0] and self._read_reports():
            continue  # the run directory may have been reported just now
        host = socket.gethostname()
        reason = f"{self._parent_name} (process {self._parent}) on {host}, which had started rank {self._rank}, is gone"
        self._record(
            Result(
                status=FAILED,
                reason=reason,
                started=self._started,
                ended=steady_time(),
                iterations=self._directory.last_iteration() if self._directory is not None else 0,
                rank=self._rank,
                node=host,
                last_checkpoint=self._directory.last_checkpoint() if self._directory is not None else "",
            )
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        remove_segments(self._segments)
        os._exit(EXIT_RUN_FAILED)

    def _forward(self, number: int, _frame: Optional[FrameType]) -> None:
        self._forwarded.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _result(self, number: int, ended: float, is_out_of_memory: bool) -> Result:
        name = signal_name(number)
        status, reason = FAILED, f"killed by signal {number} ({name})"
        if number == signal.SIGBUS:
            reason += f": {bus_error_cause(this_system().path(SHARED_MEMORY))}"
        if number in self._forwarded:
            status, reason = INTERRUPTED, f"ended by {name} before it could stop by itself"
        elif number == signal.SIGKILL and is_out_of_memory:
            status, reason = OUT_OF_MEMORY, f"{reason}: the kernel has killed processes of this node for memory"
        if not self._has_joined:
            reason += f" on {socket.gethostname()} before it joined MPI"
        last_iteration = self._directory.last_iteration() if self._directory is not None else 0
        return Result(
            status=status,
            reason=f"rank {self._rank}: {reason}",
            started=self._started,
            ended=ended,
            iterations=last_iteration,
            rank=self._rank,
            node=socket.gethostname(),
            exception=f"signal {number} ({name})",
            last_checkpoint=self._directory.last_checkpoint() if self._directory is not None else "",
        )

    def _record(self, result: Result) -> None:
        """Record what has ended this rank, unless another rank has recorded an earlier end."""
        print(f"fugaku-gpt: {result.reason}", file=sys.stderr, flush=True)
        if self._directory is None:
            return
        with contextlib.suppress(OSError, UsageError), locked(self._directory.path / "result.json"):
            # on a full disk, what was printed is all that can be done
            recorded = self._recorded()
            if recorded is not None and _are_killed_together(recorded, result):
                self._directory.write_result(_of_all(recorded, result))
            else:
                is_consequence = recorded is not None and recorded.ended > result.ended and recorded.status == FAILED
                if self._directory.write_result(result, replace=is_consequence) and self._rank == 0:
                    self._has_printed_failure = True
                    print("\n".join(failure_lines(result)[1:]), file=sys.stderr, flush=True)
        if result.signal == signal.SIGKILL:
            time.sleep(_TOGETHER_SECONDS)  # until other ranks that were killed at this time are recorded, too
        else:
            self._wait_for_summary_of_rank_0()

    def _wait_for_summary_of_rank_0(self) -> None:
        """Give rank 0's supervisor time to print what this rank has recorded, before the launcher learns of the end."""
        result = self._recorded()
        if self._rank != 0 and result is not None and result.rank == self._rank:
            time.sleep(SUMMARY_SECONDS)

    def _recorded(self) -> Optional[Result]:
        """The run's result; also None if it cannot be read: a rank must not die because its supervisor reads it."""
        try:
            return self._directory.result() if self._directory is not None else None
        except UsageError:
            return None

    def _print_recorded_failure(self) -> None:
        """On rank 0, print how another rank has failed."""
        if self._rank != 0 or self._has_printed_failure or self._directory is None:
            return
        result = self._recorded()
        if result is None or result.status in (OK, INTERRUPTED, HUNG) or result.ended < self._started:
            return
        self._has_printed_failure = True
        if result.rank not in (0, None):  # rank 0 has printed its own failure, and one of all ranks
            print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)


def _are_killed_together(recorded: Result, result: Result) -> bool:
    """True if the ranks of a recorded result and this one were killed by one signal at one time, before a launcher
    could have ended one for the other."""
    return (
        recorded.status == FAILED
        and recorded.signal == result.signal == signal.SIGKILL
        and bool(_ranks_killed(recorded))
        and abs(recorded.ended - result.ended) < _TOGETHER_SECONDS
    )


def _ranks_killed(result: Result) -> List[int]:
    """The ranks that the reason of a result by this module names."""
    names = _KILLED.match(result.reason)
    return [int(rank) for rank in names[1].split(", ")] if names else []


def _of_all(recorded: Result, result: Result) -> Result:
    """The result of ranks that were killed together: none of them is the cause. It names some of them."""
    ranks = sorted({*_ranks_killed(recorded), *_ranks_killed(result)})
    if len(ranks) > _MOST_NAMED_RANKS:
        return recorded
    return replace(
        recorded,
        reason=f"ranks {', '.join(map(str, ranks))}: {result.reason.partition(': ')[2]}, at one time",
        rank=None,
        node=result.node if recorded.node == result.node else "",
        ended=min(recorded.ended, result.ended),
    )


def _name_of(process: int) -> str:
    """The name of a process, as the kernel has it."""
    return this_system().read(f"proc/{process}/comm") or "the launcher"


def _prctl(option: int, value: object) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
