"""Runs commands of a Python as forks of one process: importing PyTorch takes seconds, and a minute where Python is
emulated.

    python tests/support/fork_server.py SOCKET PYTHON

A program at PYTHON, which stands for that Python (``forked_python.py``), sends its arguments, variables, folder
and open files through the socket. What it gets is a fork of this process, in which PyTorch is imported, but no kernel
loaded, no thread started and MPI not initialised. The server ends when the last connection has been closed, and with a
connection the process that was started by it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import Any, Dict, List, Tuple

READY = b"ready\n"  # the answer to an empty command
_FIRST_FILE = 200  # received files are moved there, out of the way of their numbers
_UNUSED_SECONDS = 900.0  # after which it ends if nobody has connected
_MODULES = (
    "mpi4py",
    "numpy",
    "psutil",
    "torch",
    "fugaku_gpt.cli.data",
    "fugaku_gpt.cli.env",
    "fugaku_gpt.cli.main",
    "fugaku_gpt.cli.train",
    "fugaku_gpt.data.prepare",
    "fugaku_gpt.doctor.run",
    "fugaku_gpt.kernels.check",
    "fugaku_gpt.launch.launcher",
    "fugaku_gpt.ops.product_timing",
)


def _receive(connection: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    """Returns a command and its open files."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 20, 8)
    size, _, rest = text.partition(b"\n")
    while text and len(rest) < int(size):
        text = connection.recv(1 << 20)
        rest += text
    if not text:  # what would have sent it was killed
        for file in files:
            os.close(file)
        return {}, []
    return json.loads(rest), list(files)


def _become(command: Dict[str, Any], files: List[int]) -> None:
    """Makes this process, a fork, that of a command."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FILE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, command["numbers"]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["folder"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class _Server:
    """Starts a process for each connection that asks for one."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path + ".new")
        self._listener.listen(64)
        os.rename(path + ".new", path)  # it exists once it answers
        self._connections: Dict[int, socket.socket] = {}
        self._processes: Dict[int, int] = {}  # process → number of its connection
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(write)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def next_command(self) -> Dict[str, Any]:
        """Returns the command that this process, a fork, is to run; the server itself does not return."""
        was_used = False
        while self._connections or not was_used:
            waits_for = [self._listener, self._wakeup, *self._connections.values()]
            readable, _, _ = select.select(waits_for, [], [], None if was_used else _UNUSED_SECONDS)
            if not readable:
                break
            if self._wakeup in readable:
                self._report_ended()
            for connection in [c for c in readable if isinstance(c, socket.socket) and c is not self._listener]:
                self._close(connection)  # it sends nothing after its command
            if self._listener in readable:
                was_used = True
                connection, _ = self._listener.accept()
                command, files = _receive(connection)  # an empty one: the connection counts, and nothing is started
                self._connections[connection.fileno()] = connection
                if not command:
                    with contextlib.suppress(OSError):
                        connection.sendall(READY)
                if command and self._start(connection, files, command["arguments"]):
                    self._leave()
                    _become(command, files)
                    return command
        os._exit(0)

    def _start(self, connection: socket.socket, files: List[int], arguments: List[str]) -> bool:
        """Forks; returns whether this is the fork."""
        process = os.fork()
        if process == 0:
            return True
        self._processes[process] = connection.fileno()
        print(f"process {process}: {arguments}", file=sys.stderr, flush=True)
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % process)
        return False

    def _leave(self) -> None:
        """Closes what belongs to the server, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in [self._listener, *self._connections.values()]:
            connection.close()
        os.close(self._wakeup)

    def _report_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 64):
                pass
        for process in list(self._processes):
            ended, status, usage = os.wait4(process, os.WNOHANG)
            if ended:
                seconds = usage.ru_utime + usage.ru_stime  # with those of its children
                print(f"process {process} has ended: {seconds:.1f} s of processor time", file=sys.stderr, flush=True)
                connection = self._connections.pop(self._processes.pop(process), None)
                if connection is not None:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % status)
                    connection.close()

    def _close(self, connection: socket.socket) -> None:
        number = connection.fileno()
        if self._connections.pop(number, None) is None:
            return
        for process in [process for process, owner in self._processes.items() if owner == number]:
            os.kill(process, signal.SIGKILL)
            del self._processes[process]
            os.waitpid(process, 0)
        connection.close()


def _run(arguments: List[str]) -> None:
    """Does what Python does with its arguments; options besides `-m` and `-c` are ignored."""
    while arguments[0] in ("-u", "-I", "-S", "-s", "-E", "-W", "-X"):
        del arguments[: 2 if arguments[0] in ("-W", "-X") else 1]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
            program.write(rest[0])
            program.flush()
            runpy.run_path(program.name, run_name="__main__")
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _end(code: object) -> None:
    """Ends a fork without taking apart what it has imported, which takes as long as half a start."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    number = code if isinstance(code, int) else 0
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does at its end
    atexit._run_exitfuncs()
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():  # mpi4py does it after Python's functions
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if mpi is not None:
        ctypes.CDLL(None).exit(number)  # MPICH takes leave of its launcher in a function of the C library's for the end
    os._exit(number)


def main() -> None:
    path, python = sys.argv[1:]
    del sys.path[0]  # the folder of this file, whose names are not those of a command
    for module in _MODULES:
        __import__(module)
    assert "mpi4py.MPI" not in sys.modules, "MPI is initialised, which only forks may do"
    print(f"modules are imported: {time.process_time():.1f} s of processor time", file=sys.stderr, flush=True)
    server = _Server(path)
    sys.executable = python
    arguments = server.next_command()["arguments"]
    code: object = 0
    try:
        _run(arguments)
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


if __name__ == "__main__":
    main()
