"""Messages between a command and the daemon: an invocation and its reply, each one line of JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional


@dataclass(frozen=True)
class Invocation:
    """One command line and the process that runs it.

    Attributes:
        command: ``pjsub``, ``pjstat``, ..., or ``order`` for the daemon's own orders.
        arguments: its arguments.
        directory: its working directory.
        environment: its environment variables.
        umask: umask of its process.
        stdin: its standard input; None unless the daemon has asked for it.
    """

    command: str
    arguments: List[str]
    directory: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    umask: int = 0o022
    stdin: Optional[str] = None


@dataclass
class Reply:
    """The output and the exit code of a command.

    Attributes:
        out: text for standard output.
        err: text for standard error.
        code: exit code.
        want_stdin: True if the command is to print nothing, and to send its standard input with a second invocation.
        delay: seconds by which the daemon delays the reply.
    """

    out: str = ""
    err: str = ""
    code: int = 0
    want_stdin: bool = False
    delay: float = 0.0

    def to_values(self) -> Dict[str, Any]:
        """The reply as JSON values, without the delay."""
        return {"out": self.out, "err": self.err, "code": self.code, "want_stdin": self.want_stdin}


# returns the reply as soon as the jobs allow one, else None; the daemon calls it until then
DeferredReply = Callable[[], Optional[Reply]]


def pjm_message(command: str, code: int, text: str, kind: str = "ERR.") -> str:
    """One message in PJM's form, such as ``[ERR.] PJM 0112 pjdel Job 1 does not exist.``"""
    return f"[{kind}] PJM {code:04d} {command} {text}\n"
