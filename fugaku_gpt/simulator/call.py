"""What a command sends to the daemon, and what it gets back; both are lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional


@dataclass(frozen=True)
class Call:
    """One command line.

    Attributes:
        command: ``pjsub``, ...
        words: its arguments.
        directory: where it was started.
        environment: its variables.
        umask: of its process.
        stdin: what it read, once it was asked to.
    """

    command: str
    words: List[str]
    directory: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    umask: int = 0o022
    stdin: Optional[str] = None


@dataclass
class Reply:
    """What the command prints, and its exit code.

    Attributes:
        want_stdin: print nothing: read standard input and call again.
        delay: seconds before the answer is given.
    """

    out: str = ""
    err: str = ""
    code: int = 0
    want_stdin: bool = False
    delay: float = 0.0

    def to_values(self) -> Dict[str, Any]:
        """As JSON values."""
        return {"out": self.out, "err": self.err, "code": self.code, "want_stdin": self.want_stdin}


# looks at the jobs and answers, or is asked again later
Pending = Callable[[], Optional[Reply]]


def message(command: str, code: int, text: str, kind: str = "ERR.") -> str:
    """One line in PJM's form: ``[ERR.] PJM 0112 pjdel Job 1 does not exist.``"""
    return f"[{kind}] PJM {code:04d} {command} {text}\n"
