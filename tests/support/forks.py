"""A Python in which PyTorch is imported already: what it runs are forks of one process, which all workers share."""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, Mapping, Optional

import pytest

from tests.support.fork_server import READY

_PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")  # looked for beside Python


class ForkedPython:
    """Stands for a Python: each command runs in a fork of a process that has imported PyTorch.

    The workers of pytest share that process. It ends with the last of them.

    Attributes:
        program: what is run in place of that Python.
    """

    def __init__(self, folder: Path, python: Path, environment: Optional[Mapping[str, str]] = None) -> None:
        """
        Args:
            folder: the same for all workers; the first one makes it.
            python: the Python that is stood for.
            environment: the variables of the process; default: those of this one.
        """
        self.program = folder / "python"
        self._python, self._environment = python, environment
        self._start_time = time.monotonic()
        with self._locked():
            if not self.program.exists():
                self._make_program(python)
                self._start()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.program.parent.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_program(self, python: Path) -> None:
        directory = self.program.parent
        directory.mkdir()
        for name in _PROGRAMS:
            if (python.parent / name).exists():
                (directory / name).symlink_to(python.parent / name)
        client = Path(__file__).with_name("forked_python.py")
        text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E {shlex.quote(str(client))} "$0" "$@"\n'
        self.program.write_text(text, encoding="utf-8")
        self.program.chmod(0o755)

    def _start(self) -> None:
        """Starts the process, without waiting for it."""
        directory, server = self.program.parent, Path(__file__).with_name("fork_server.py")
        command = [str(self._python), str(server), str(directory / "server"), str(self.program)]
        with open(directory / "log", "wb") as log:
            subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._start_time = time.monotonic()

    def connect(self, seconds: float = 900.0) -> socket.socket:
        """Returns a connection, as long as which the process lives; waits until it answers."""
        try:
            return self._connected(seconds)
        except ConnectionRefusedError:  # it has ended with the last worker that had used it
            with self._locked():
                try:
                    return self._connected(seconds)  # another worker has started it anew meanwhile
                except ConnectionRefusedError:
                    (self.program.parent / "server").unlink()
                    self._start()
                    return self._connected(seconds)

    def _connected(self, seconds: float) -> socket.socket:
        address = self.program.parent / "server"
        while not address.exists():
            log = (self.program.parent / "log").read_text(encoding="utf-8")
            assert "Error" not in log and time.monotonic() < self._start_time + seconds, log
            time.sleep(0.2)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(address))
        except OSError:
            connection.close()
            raise
        connection.sendall(b"2\n{}")
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(len(READY))
        if answer != READY:  # it was about to end
            connection.close()
            raise ConnectionRefusedError(f"{address}: the process has ended")
        return connection


@contextlib.contextmanager
def starting(program: Optional[Path]) -> Iterator[None]:
    """Lets ``sys.executable``, by which ranks and other processes are started, be this program; None: as it is."""
    with pytest.MonkeyPatch.context() as patch:
        if program is not None:
            patch.setattr(sys, "executable", str(program))
        yield
