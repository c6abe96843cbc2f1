"""Starts ranks that converse with the user of this process: they read its input, and print where it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from types import FrameType
from typing import IO, Iterator, List, Mapping, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.processes import GRACE_SECONDS, MARK, Outcome, end_marked_processes
from fugaku_gpt.machine.local import out_of_memory_kills
from fugaku_gpt.machine.rank import without_launch_variables

INTERRUPT_LINE = b"\x03\n"  # what ranks read at Ctrl-C, which itself would end their launcher
STANDARD_INPUT = 0  # its descriptor
_POLL_SECONDS = 0.05
_BLOCK = 65536
# Ctrl-C this many times within this time ends ranks that do not react.
_IMPATIENT_COUNT, _IMPATIENT_SECONDS = 3, 3.0


def run_conversation(argv: Sequence[str], environment: Mapping[str, str]) -> Outcome:
    """Run a command in a session of its own until it ends.

    It gets this process's input as it comes and, where that is a terminal, :data:`INTERRUPT_LINE` at SIGINT. At SIGTERM
    and SIGHUP, at the third SIGINT within three seconds, and at one that no terminal has sent or that the command can
    no longer read, it is ended with all processes that it has started; what is left after ``GRACE_SECONDS`` is killed.

    Raises:
        UsageError: it cannot be started.
    """
    mark, kills_before, started = uuid.uuid4().hex, out_of_memory_kills(), time.monotonic()
    signals = _Signals()  # before there is a process that they could leave behind
    process: Optional[subprocess.Popen[bytes]] = None
    stopped_by: Optional[int] = None
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            env={**without_launch_variables(os.environ), **environment, MARK: mark},
            start_new_session=True,
        )
        assert process.stdin is not None
        user_input = _Input(process.stdin)
        while process.poll() is None and stopped_by is None:
            for number in signals.take():
                if not (number == signal.SIGINT and not signals.is_impatient and user_input.interrupt()):
                    stopped_by = number
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise UsageError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    finally:
        if process is not None:
            end_marked_processes(mark, GRACE_SECONDS, process)
            process.wait()
        signals.restore()
    return Outcome(
        exit_code=process.returncode,
        signal=-process.returncode if process.returncode < 0 else None,
        timed_out=False,
        seconds=time.monotonic() - started,
        oom_kills=max(0, out_of_memory_kills() - kills_before),
        stopped_by=stopped_by,
    )


def read_lines(descriptor: int, longest: int) -> Iterator[bytes]:
    """Read lines with their ends, those of more than ``longest`` bytes in pieces. No buffered object of Python's is
    used: a thread that waits in one while Python ends would abort the process."""
    rest = b""
    for block in iter(lambda: os.read(descriptor, _BLOCK), b""):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield from _pieces(line + b"\n", longest)
        if len(rest) > longest:
            yield rest[:longest]
            rest = rest[longest:]
    if rest:
        yield from _pieces(rest, longest)


def _pieces(line: bytes, longest: int) -> Iterator[bytes]:
    for start in range(0, len(line), longest):
        yield line[start : start + longest]


class _Signals:
    """Collects the signals that come to this process, until the former handlers are restored."""

    def __init__(self) -> None:
        self._numbers: List[int] = []
        self._interrupts: List[float] = []  # times of the last SIGINTs
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._former = {number: signal.signal(number, self._catch) for number in handled}

    @property
    def is_impatient(self) -> bool:
        """Whether SIGINT has come several times within a short time."""
        times = self._interrupts[-_IMPATIENT_COUNT:]
        return len(times) == _IMPATIENT_COUNT and times[-1] - times[0] < _IMPATIENT_SECONDS

    def take(self) -> List[int]:
        """Return the signals that have come since the last call."""
        return [self._numbers.pop(0) for _ in range(len(self._numbers))]

    def restore(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: Optional[FrameType]) -> None:
        if number == signal.SIGINT:
            self._interrupts.append(time.monotonic())
        self._numbers.append(number)


class _Input:
    """Passes this process's input on to a command, in a thread."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._lock = threading.Lock()  # of the command's input
        threading.Thread(target=self._copy, daemon=True).start()

    def interrupt(self) -> bool:
        """Pass on a Ctrl-C; returns whether a terminal has sent it, and the command can still read it."""
        if not os.isatty(STANDARD_INPUT) or not self._lock.acquire(timeout=_POLL_SECONDS):  # it reads no more
            return False
        try:
            return self._write(INTERRUPT_LINE)
        finally:
            self._lock.release()

    def _copy(self) -> None:
        try:
            for block in iter(lambda: os.read(STANDARD_INPUT, _BLOCK), b""):
                with self._lock:
                    if not self._write(block):
                        return
        except OSError:  # the terminal is gone: the conversation is over
            pass
        with self._lock:
            self._target.close()

    def _write(self, content: bytes) -> bool:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._target.fileno(), rest) :]
        except (OSError, ValueError):  # the command has ended, or its input
            return False
        return True
