"""Reads what a command prints, in a thread, and passes it on in lines."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import IO, Callable, List, Optional

from fugaku_gpt.launch.log_file import LogFile
from fugaku_gpt.launch.rank_supervisor import unread_bytes

_BLOCK = 65536


class OutputReader:
    """Passes on the lines of one stream of a command. Whatever fails, the pipe is emptied: a process that prints into a
    full one waits for ever.

    Attributes:
        problem: what ``on_line`` has raised, but for ``OSError`` and ``ValueError``; None: nothing.
    """

    def __init__(self, stream: IO[bytes], log: Optional[LogFile], on_line: Optional[Callable[[str], None]]) -> None:
        """Begin to read.

        Args:
            stream: the end of the pipe to read, which is closed at the end.
            log: gets each line.
            on_line: called with each line, without its end, until it raises an exception, such as ``OSError`` for a
                terminal that is gone.
        """
        self.problem: Optional[Exception] = None
        self._stream, self._log, self._on_line = stream, log, on_line
        self._lock = threading.Lock()  # of the two numbers, together with what is still in the pipe
        self._bytes_read = 0
        self._last: Optional[int] = None  # number of bytes to read; None as long as the command runs
        self._wakeup_read, self._wakeup_write = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop reading behind what the pipe holds at this moment, since the command has ended. A process that has
        outlived it may keep the pipe open, and write more."""
        with self._lock:
            self._last = self._bytes_read
            with contextlib.suppress(OSError, ValueError):  # it has been read to its end and closed
                self._last += unread_bytes(self._stream.fileno())
        os.close(self._wakeup_write)

    def has_ended(self, seconds: float) -> bool:
        """Whether all is passed on, now or within some seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _read(self) -> None:
        pieces: List[bytes] = []  # of a line whose end has not come
        for block in iter(self._next_block, b""):
            first, *others = block.split(b"\n")
            pieces.append(first)
            for next_line in others:
                self._pass_on(b"".join(pieces) + b"\n")
                pieces = [next_line]
        if any(pieces):
            self._pass_on(b"".join(pieces))
        with self._lock:
            self._stream.close()
        os.close(self._wakeup_read)

    def _next_block(self) -> bytes:
        """Return what comes next; nothing at the end."""
        descriptor, waits_for = self._stream.fileno(), [self._stream.fileno(), self._wakeup_read]
        while True:
            readable, _, _ = select.select(waits_for, [], [])
            with self._lock:
                most = _BLOCK if self._last is None else min(_BLOCK, self._last - self._bytes_read)
                if descriptor in readable or most == 0:
                    block = os.read(descriptor, most) if most else b""
                    self._bytes_read += len(block)
                    return block
                if self._last is not None:  # all that is to be read is in the pipe
                    waits_for = [descriptor]

    def _pass_on(self, line: bytes) -> None:
        if self._log is not None:
            self._log.write(line)
        if self._on_line is not None:
            try:
                self._on_line(line.decode("utf-8", "replace").rstrip("\r\n"))
            except Exception as error:  # the log has the line, and gets the others
                self._on_line = None
                # a terminal that is gone is no problem of the command's
                self.problem = None if isinstance(error, (OSError, ValueError)) else error
