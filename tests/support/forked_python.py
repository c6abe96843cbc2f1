"""Stands for a Python: runs its arguments in a fork of the process behind a socket (``fork_server.py``).

    python forked_python.py FOLDER/python ARGUMENTS...

The socket is ``FOLDER/server``. Signals are passed on, and it ends as the fork has ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def _line(connection: socket.socket) -> int:
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise SystemExit("forked_python.py: the process that was to be forked has ended")
        text += part
    return int(text)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until the process is there that gets them
    numbers = [0, 1, 2]
    connection_of_rank = os.environ.get("PMI_FD", "")  # MPICH's, with its launcher
    if connection_of_rank.isdigit() and os.path.exists(f"/proc/self/fd/{connection_of_rank}"):
        numbers.append(int(connection_of_rank))
    command = {
        "arguments": sys.argv[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "numbers": numbers,
    }
    text = json.dumps(command).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(sys.argv[1]), "server"))
    socket.send_fds(connection, [b"%d\n" % len(text)], numbers)
    connection.sendall(text)
    process = _line(connection)
    for number in _FORWARDED:
        signal.signal(number, lambda forwarded, _: os.kill(process, forwarded))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = _line(connection)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
