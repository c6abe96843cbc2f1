"""Starts ranks that converse with the user of this process: they read its input, and print where it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from types import FrameType
from typing import IO, Mapping, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.processes import GRACE_SECONDS, MARK, end_marked_processes
from fugaku_gpt.machine.rank import without_launch_variables

INTERRUPT_LINE = b"\x03\n"  # what ranks read at Ctrl-C, which itself would end their launcher


def run_conversation(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command in a session of its own until it ends; return its exit code, or 128 + N if signal N ended it.

    It gets the lines of this process's input as they come, and :data:`INTERRUPT_LINE` at SIGINT. At SIGTERM or SIGHUP
    it is ended, with all processes that it has started.

    Raises:
        UsageError: it cannot be started.
    """
    mark = uuid.uuid4().hex
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            env={**without_launch_variables(os.environ), **environment, MARK: mark},
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    assert process.stdin is not None
    ended_by = 0

    def interrupt(number: int, frame: Optional[FrameType]) -> None:
        _send(process.stdin, INTERRUPT_LINE)

    def end(number: int, frame: Optional[FrameType]) -> None:
        nonlocal ended_by
        ended_by = number
        process.terminate()

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: end, signal.SIGHUP: end}
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        threading.Thread(target=_copy_input, args=(process.stdin,), daemon=True).start()
        code = process.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        end_marked_processes(mark, GRACE_SECONDS, process)
    return 128 + (ended_by or -code) if ended_by or code < 0 else code


def _copy_input(target: IO[bytes]) -> None:
    for line in iter(sys.stdin.buffer.readline, b""):
        if not _send(target, line):
            return
    with contextlib.suppress(OSError):
        target.close()


def _send(target: Optional[IO[bytes]], line: bytes) -> bool:
    """Write a line at once, behind Python's buffers, which a signal's handler must not enter; returns whether it could
    be written."""
    try:
        content = memoryview(line)
        while target is not None and content:
            content = content[os.write(target.fileno(), content) :]
    except (OSError, ValueError):  # the command has ended, or its input
        return False
    return True
