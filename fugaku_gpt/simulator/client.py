"""The client behind ``pjsub`` and the other commands: it sends the command line to the daemon and prints the reply.

It imports little, so that a command takes hardly longer than the start of its interpreter.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, Dict, List, Optional

from fugaku_gpt.json_text import parse_json

BANNER = "simulated PJM on this machine, not Fugaku"
_FIRST_MESSAGE = {"pjsub": 0, "pjdel": 100, "pjstat": 200, "pjhold": 300, "pjrls": 400, "pjwait": 600, "pjacl": 700}
COMMANDS = tuple(_FIRST_MESSAGE)


def connect(root: str) -> socket.socket:
    """Connect to the daemon of a folder.

    Raises:
        OSError: no daemon listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    working_directory = os.open(".", os.O_RDONLY)
    try:
        os.chdir(root)  # the path of a socket is limited to 107 bytes, that of a folder is not
        connection.connect("socket")
    finally:
        os.fchdir(working_directory)
        os.close(working_directory)
    return connection


def send_request(root: str, values: Dict[str, Any], timeout: Optional[float] = None) -> Dict[str, Any]:
    """Send one invocation and wait for its reply.

    Raises:
        OSError: no daemon listens, it ended before it replied, or it has not replied within ``timeout`` seconds.
    """
    with connect(root) as connection:
        connection.settimeout(timeout)
        connection.sendall((json.dumps(values) + "\n").encode("utf-8", "surrogateescape"))
        received = bytearray()
        while not received.endswith(b"\n"):
            chunk = connection.recv(1 << 20)
            if not chunk:
                raise ConnectionResetError("the simulator has ended")
            received += chunk
    reply = parse_json(received.decode("utf-8", "surrogateescape"))
    assert isinstance(reply, dict)
    return reply


def invocation_values(command: str, arguments: List[str]) -> Dict[str, Any]:
    """An invocation by this process, as JSON values."""
    umask = os.umask(0o022)
    os.umask(umask)
    try:
        directory = os.getcwd()
    except OSError:
        directory = ""
    return {
        "command": command,
        "arguments": arguments,
        "directory": directory,
        "environment": dict(os.environ),
        "umask": umask,
    }


def main(root: str, command: str, arguments: List[str]) -> int:
    """Run one command and return its exit code."""
    sys.stderr.write(f"{command}: {BANNER}\n")
    sys.stderr.flush()  # Python before 3.9 buffers it: it would come after the lines written to the buffer below
    values = invocation_values(command, arguments)
    try:
        reply = send_request(root, values)
        if reply["want_stdin"]:
            values["stdin"] = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
            reply = send_request(root, values)
    except OSError as error:
        code = _FIRST_MESSAGE[command] + 90
        sys.stderr.write(f"[ERR.] PJM {code:04d} {command} No simulator runs in {root}: {error.strerror or error}.\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stderr.buffer.write(reply["err"].encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.write(reply["out"].encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
    return int(reply["code"])
