"""Runs one command with many processes: streams its output, limits its time, can stop it, and leaves no process behind.

A launcher's ranks sit in sessions of their own (MPICH), so no process group contains them all, and once their launcher
is dead, no process tree does. So each command gets a mark, a variable of its environment, which all of its processes
inherit and by which they are found.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Union

import psutil

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.log_file import LogFile
from fugaku_gpt.launch.output_reader import OutputReader
from fugaku_gpt.machine.local import out_of_memory_kills
from fugaku_gpt.machine.rank import without_launch_variables
from fugaku_gpt.records.claim import HOLDER_VARIABLE

MARK = HOLDER_VARIABLE
GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0
_OUTPUT_AFTER_SIGNAL_SECONDS = 5.0
_CAUGHT_SIGNALS = (signals.SIGINT, signals.SIGTERM, signals.SIGHUP, signals.SIGUSR1)
_KILL_SIGNALS = (signals.SIGINT, signals.SIGTERM)  # a second one of these kills the command
# one request may arrive twice: at the process group, and from the job's script
_DUPLICATE_SECONDS = 3.0
OnLine = Callable[[str], None]


def _never() -> bool:
    return False


def _ignore(_number: int) -> None:
    pass


class SeparateStreams(NamedTuple):
    """Functions that are called with the lines of standard output, and with those of standard error."""

    on_output: OnLine
    on_error: OnLine


@dataclass(frozen=True)
class Control:
    """How a command that runs ranks is asked to stop, and when it is ended although it has not stopped.

    Attributes:
        stop_signal: the signal at which it saves its state and ends by itself; it gets that in place of SIGTERM.
        save_seconds: how long saving may take; whatever lives then is ended.
        can_save: whether there is something to save yet; if not, it gets SIGTERM.
        on_stop: called with the signal to this process when the command is asked to save its state and end.
        is_lost: called often; whether the command is to be ended, as where ranks are gone.
    """

    stop_signal: int
    save_seconds: float
    can_save: Callable[[], bool] = lambda: True
    on_stop: Callable[[int], None] = _ignore
    is_lost: Callable[[], bool] = _never


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: exit code of the launcher; -N if signal N killed it.
        signal: the signal that killed the launcher itself, or None.
        timed_out: whether it was ended at its time limit.
        seconds: how long it ran.
        oom_kills: number of processes on this machine that the kernel killed for memory meanwhile.
        stopped_by: the signal to this process for which the command was ended (Ctrl-C: SIGINT), or None.
        is_lost: whether it was ended because :class:`Control` called it lost.
        lost_reason: what had become of its ranks then, which the caller fills in; or empty.
        lost_after: seconds after its start at which that was noticed; whatever ended later was ended for it.
    """

    exit_code: int
    signal: Optional[int]
    timed_out: bool
    seconds: float
    oom_kills: int
    stopped_by: Optional[int] = None
    is_lost: bool = False
    lost_reason: str = ""
    lost_after: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the command ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and self.stopped_by is None and not self.is_lost


def run_command(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    log: Optional[Path] = None,
    timeout: Optional[float] = None,
    on_line: Union[OnLine, SeparateStreams, None] = None,
    grace: float = GRACE_SECONDS,
    mark: Optional[str] = None,
    control: Optional[Control] = None,
) -> Outcome:
    """Run a command to its end in a session of its own.

    At the time limit, or when this process gets SIGINT, SIGTERM, SIGHUP or SIGUSR1, the command gets SIGTERM, and what
    is left after ``grace`` seconds, or at a second signal, SIGKILL. The previous signal handlers are restored
    afterwards; only the main thread sees signals. Returns when all output is passed on, unless a signal has come.

    Args:
        environment: variables that are set on top of those of this process, without those that make it a rank.
        log: a file to which everything that the command prints is appended.
        timeout: time limit in seconds; None for no limit.
        on_line: called with each line of standard output and standard error, without its newline, from another thread;
            or a function for each of the two.
        mark: the mark by which the command's processes are found; default: a new one.
        control: how it is asked to stop when this process gets a signal; by default it is ended.

    Raises:
        UsageError: the command cannot be started, or ``log`` cannot be written.
    """
    mark = mark if mark is not None else uuid.uuid4().hex
    kills_before = out_of_memory_kills()
    started = time.monotonic()
    sink = LogFile(log) if log is not None else None
    try:
        with _CaughtSignals() as caught:
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE if isinstance(on_line, SeparateStreams) else subprocess.STDOUT,
                    env={**without_launch_variables(os.environ), **environment, MARK: mark},
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"{argv[0]}: cannot be started: {error.strerror}") from None
            assert process.stdout is not None
            if isinstance(on_line, SeparateStreams):
                assert process.stderr is not None
                readers = [
                    OutputReader(process.stdout, sink, on_line.on_output),
                    OutputReader(process.stderr, sink, on_line.on_error),
                ]
            else:
                readers = [OutputReader(process.stdout, sink, on_line)]
            timed_out, is_lost, lost_after = False, False, 0.0
            saving_until: Optional[float] = None
            try:
                while process.poll() is None and not caught.is_impatient:
                    if timeout is not None and time.monotonic() - started > timeout:
                        timed_out = True
                        break
                    if caught.numbers and saving_until is None:
                        if control is None or not control.can_save():
                            break
                        saving_until = time.monotonic() + control.save_seconds
                        process.send_signal(control.stop_signal)
                        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone: ranks still save
                            control.on_stop(caught.numbers[0])
                    if saving_until is not None and time.monotonic() > saving_until:
                        break
                    is_lost = control is not None and control.is_lost()
                    if is_lost:
                        lost_after = time.monotonic() - started
                        break
                    time.sleep(_POLL_SECONDS)
            finally:  # whatever happens, no process of the command may stay behind
                if is_lost:  # a launcher that has just lost its ranks is about to print how each has ended
                    _wait(lambda: process.poll() is not None, _LAST_WORDS_SECONDS, caught)
                if process.poll() is None:
                    process.terminate()
                    for stopped in marked_processes(mark) if is_lost else []:
                        _signal(stopped, signals.SIGCONT)  # a stopped process ends only when it runs again
                    _wait(lambda: process.poll() is not None and not marked_processes(mark), grace, caught)
                    grace = 0.0  # every process has been asked to end: the rest is killed
                end_marked_processes(mark, grace, process)
                process.wait()
            seconds = time.monotonic() - started
            _pass_on_output(readers, caught)
            for reader in readers:
                if reader.problem is not None:
                    raise reader.problem
    finally:
        if sink is not None:
            sink.close()
    return Outcome(
        exit_code=process.returncode,
        signal=-process.returncode if process.returncode < 0 else None,
        timed_out=timed_out,
        seconds=seconds,
        oom_kills=max(0, out_of_memory_kills() - kills_before),
        stopped_by=caught.numbers[0] if caught.numbers else None,
        is_lost=is_lost,
        lost_after=lost_after,
    )


def marked_processes(mark: str) -> List[psutil.Process]:
    """The living processes that carry a mark, of this user and on this machine."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                processes.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return [process for process in processes if process.pid != os.getpid()]


def living_marks() -> Set[str]:
    """The marks of all living processes of this user on this machine."""
    marks = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
            if process.status() != psutil.STATUS_ZOMBIE:
                marks.add(process.environ().get(MARK, ""))
    return marks - {""}


def end_marked_processes(mark: str, grace: float, child: Optional[subprocess.Popen[bytes]] = None) -> int:
    """End every process that carries a mark: SIGTERM, SIGKILL after ``grace`` seconds. Returns how many there were.

    The leaves of each process tree are killed first, so that parents reap them and a launcher can clean up. ``child``,
    a child of this process, is reaped.
    """
    processes = marked_processes(mark)
    for process in processes if grace > 0 else []:
        _signal(process, signals.SIGTERM)
    if processes and grace > 0:
        _wait(lambda: not _living_after_reaping(mark, child), grace)
    while _living_after_reaping(mark, child):
        remaining = marked_processes(mark)
        parents = {_parent(process) for process in remaining}
        for process in remaining:
            if process.pid not in parents:
                _signal(process, signals.SIGKILL)
        _wait(lambda: not _living_after_reaping(mark, child), 1.0)
    return len(processes)


def _living_after_reaping(mark: str, child: Optional[subprocess.Popen[bytes]]) -> List[psutil.Process]:
    if child is not None:
        child.poll()
    return marked_processes(mark)


def _parent(process: psutil.Process) -> Optional[int]:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended already
        process.send_signal(number)


def _wait(done: Callable[[], bool], seconds: float, caught: Optional[_CaughtSignals] = None) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline and not (caught is not None and caught.is_impatient):
        time.sleep(_POLL_SECONDS)


def _pass_on_output(readers: Sequence[OutputReader], caught: _CaughtSignals) -> None:
    """Wait until all that the command has printed is passed on, however slow that is, as into a pager; but not for long
    after a signal."""
    for reader in readers:
        reader.finish()
    deadline = time.monotonic() + _OUTPUT_AFTER_SIGNAL_SECONDS
    was_signalled = bool(caught.numbers)
    for reader in readers:
        while not reader.has_ended(_POLL_SECONDS) and not caught.is_impatient:
            if caught.numbers and (not was_signalled or time.monotonic() > deadline):
                return


class _CaughtSignals:
    """Collects signals while a command runs; restores the previous handlers afterwards."""

    def __init__(self) -> None:
        self.numbers: List[int] = []
        self.is_impatient = False  # a second signal has come: no more waiting
        self._first_seconds = 0.0
        self._former_handlers: Dict[int, Any] = {}

    def __enter__(self) -> _CaughtSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _CAUGHT_SIGNALS:
                if signals.getsignal(number) is not signals.SIG_IGN:  # nohup: stays ignored
                    self._former_handlers[number] = signals.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former_handlers.items():
            signals.signal(number, handler)

    def _catch(self, number: int, _frame: Optional[FrameType]) -> None:
        seconds = time.monotonic()
        if not self.numbers:
            self._first_seconds = seconds
        elif number in _KILL_SIGNALS and seconds - self._first_seconds > _DUPLICATE_SECONDS:
            self.is_impatient = True
        self.numbers.append(number)
