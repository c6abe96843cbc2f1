"""The file that gets the output of a command's processes. It must never stop them, so a full disk only costs lines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from fugaku_gpt.errors import UsageError


class LogFile:
    """Appends lines to a file. Lines that cannot be written are counted; the next that can be is preceded by a line
    that says so. The first failure is also printed on standard error.

    Args:
        path: the file, which is created if it does not exist.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
        self._lost_lines = 0
        self._cause = ""
        self._ends_a_line = True
        # a reader of output may write while another thread closes: the descriptor may be that of another file by then
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        """Append a line, with its newline."""
        with self._lock:
            self._write(line)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # as over NFS, where a full disk may show only here
                os.close(descriptor)

    def _write(self, line: bytes) -> None:
        if self._descriptor < 0:  # closed: a process that has outlived its launcher prints
            return
        gap = b"" if self._ends_a_line else b"\n"
        if self._lost_lines:
            gap += f"[fugaku-gpt: {self._lost_lines} lines are lost here: {self._cause}]\n".encode()
        try:
            self._append(gap + line)
            self._lost_lines = 0
        except OSError as error:
            if not self._cause:
                with contextlib.suppress(OSError, ValueError):
                    print(
                        f"fugaku-gpt: {self._path}: cannot be written: {error.strerror}; what is printed from here on "
                        "is not in it, until it can be",
                        file=sys.stderr,
                        flush=True,
                    )
            self._cause = error.strerror or type(error).__name__
            self._lost_lines += 1

    def _append(self, content: bytes) -> None:
        while content:  # a full disk takes as many bytes as it has room for
            written = os.write(self._descriptor, content)
            self._ends_a_line = content[written - 1 : written] == b"\n"
            content = content[written:]
