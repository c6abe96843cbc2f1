"""Commands of a scheduler: run without a shell, limited in time, in one language; and how long to wait between them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Mapping, Optional, Sequence

from fugaku_gpt.errors import UsageError

TIMEOUT_SECONDS = 60.0
MAX_WAIT_SECONDS = 60.0
# variables by which a user's own settings would change the form of the answers
_FORMAT_PREFIXES = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT", "PJSTAT_")


@dataclass(frozen=True)
class Answer:
    """What a command has answered.

    Attributes:
        code: its exit code.
        out: what it printed; bytes that are not UTF-8 are replaced.
        err: what it printed as errors.
    """

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Its own words for a message: errors, else output, without blank lines."""
        text = self.err if self.err.strip() else self.out
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


class NoAnswer(UsageError):
    """The command was started and has not ended in time; what it has done is not known."""


RunCommand = Callable[..., Answer]  # as run_words


def run_command(argv: Sequence[str], *, cwd: Optional[Path] = None, timeout: float = TIMEOUT_SECONDS) -> Answer:
    """Run one command to its end; its exit code is the caller's to judge.

    Raises:
        UsageError: there is no such command on this machine, or no such folder.
        NoAnswer: it did not end within ``timeout`` seconds, and was killed.
    """
    try:
        completed = subprocess.run(
            list(argv),
            cwd=cwd,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        if cwd is not None and not cwd.is_dir():
            raise UsageError(f"{cwd}: no such folder") from None
        raise UsageError(
            f"{argv[0]}: no such command on this machine; submit and follow jobs where the scheduler is (a login "
            "node), choose another job.scheduler, or try the script here with `fugaku-gpt sim` or job.scheduler=local"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{argv[0]}: no answer within {timeout:g} s; the scheduler is busy or down: try later") from None
    except OSError as error:
        raise UsageError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    return Answer(
        completed.returncode, completed.stdout.decode("utf-8", "replace"), completed.stderr.decode("utf-8", "replace")
    )


def query_intervals(first: float = 2.0, max_wait: float = MAX_WAIT_SECONDS) -> Iterator[float]:
    """Seconds to wait before each query: none before the first, then 2, 4, 8 and so on, at most ``longest``."""
    yield 0.0
    wait = first
    while True:
        yield min(wait, max_wait)
        wait = min(wait * 2, max_wait)


def _environment(inherited: Mapping[str, str]) -> Mapping[str, str]:
    environment = {name: value for name, value in inherited.items() if not name.startswith(_FORMAT_PREFIXES)}
    return {**environment, "LC_ALL": "C"}
