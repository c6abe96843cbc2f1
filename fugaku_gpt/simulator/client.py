"""What ``pjsub`` and its kin are: the command line goes to the daemon, its answer is printed. Imports little: a command
should take no longer than its interpreter."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, Dict, List, Optional

BANNER = "simulated PJM on this machine, not Fugaku"
_BLOCK = {"pjsub": 0, "pjdel": 100, "pjstat": 200, "pjhold": 300, "pjrls": 400, "pjwait": 600, "pjacl": 700}
COMMANDS = tuple(_BLOCK)


def connect(root: str) -> socket.socket:
    """The daemon of a folder.

    Raises:
        OSError: none listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(root)  # a socket's path may have no more than 107 bytes, a folder's may
        connection.connect("socket")
    finally:
        os.fchdir(here)
        os.close(here)
    return connection


def ask(root: str, values: Dict[str, Any], timeout: Optional[float] = None) -> Dict[str, Any]:
    """Send one call, wait for its answer.

    Raises:
        OSError: no daemon listens, it has ended before it answered, or has not answered within ``timeout`` seconds.
    """
    with connect(root) as connection:
        connection.settimeout(timeout)
        connection.sendall((json.dumps(values) + "\n").encode("utf-8", "surrogateescape"))
        received = bytearray()
        while not received.endswith(b"\n"):
            data = connection.recv(1 << 20)
            if not data:
                raise ConnectionResetError("the simulator has ended")
            received += data
    answer = json.loads(received.decode("utf-8", "surrogateescape"))
    assert isinstance(answer, dict)
    return answer


def values_of(command: str, words: List[str]) -> Dict[str, Any]:
    """A call from this process, as JSON values."""
    umask = os.umask(0o022)
    os.umask(umask)
    try:
        directory = os.getcwd()
    except OSError:
        directory = ""
    return {
        "command": command,
        "words": words,
        "directory": directory,
        "environment": dict(os.environ),
        "umask": umask,
    }


def main(root: str, command: str, words: List[str]) -> int:
    """Run one command; returns its exit code."""
    sys.stderr.write(f"{command}: {BANNER}\n")
    sys.stderr.flush()  # before Python 3.9 it would come after what is written below
    values = values_of(command, words)
    try:
        answer = ask(root, values)
        if answer["want_stdin"]:
            values["stdin"] = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
            answer = ask(root, values)
    except OSError as error:
        code = _BLOCK[command] + 90
        sys.stderr.write(f"[ERR.] PJM {code:04d} {command} No simulator runs in {root}: {error.strerror or error}.\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stderr.buffer.write(answer["err"].encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.write(answer["out"].encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
    return int(answer["code"])
