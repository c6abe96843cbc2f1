"""Runs a scheduler's commands without a shell, in the C locale and with a time limit; intervals between queries."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Mapping, Optional, Sequence

from fugaku_gpt.errors import UsageError

TIMEOUT_SECONDS = 60.0
MAX_WAIT_SECONDS = 60.0
# variables with which a user's settings would change the format of the output
_FORMAT_PREFIXES = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT", "PJSTAT_")


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    Attributes:
        code: exit code.
        out: standard output; bytes that are not UTF-8 are replaced.
        err: standard error.
    """

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The command's own message: its errors, otherwise its output, without blank lines."""
        text = self.err if self.err.strip() else self.out
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


class CommandTimeout(UsageError):
    """The command was started and did not end in time; its effect is unknown."""


RunCommand = Callable[..., CommandResult]  # as run_command


def run_command(argv: Sequence[str], *, cwd: Optional[Path] = None, timeout: float = TIMEOUT_SECONDS) -> CommandResult:
    """Run one command to its end; the caller checks its exit code.

    Raises:
        UsageError: the command or the folder does not exist on this machine.
        CommandTimeout: the command did not end within ``timeout`` seconds, and was killed.
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
            f"{argv[0]}: no such command on this machine; submit and follow jobs where the scheduler runs (a login "
            "node), choose another job.scheduler, or try the script here with `fugaku-gpt sim` or job.scheduler=local"
        ) from None
    except subprocess.TimeoutExpired:
        raise CommandTimeout(
            f"{argv[0]}: no answer within {timeout:g} s; the scheduler is busy or down: try later"
        ) from None
    except OSError as error:
        raise UsageError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    return CommandResult(
        completed.returncode, completed.stdout.decode("utf-8", "replace"), completed.stderr.decode("utf-8", "replace")
    )


def query_intervals(first: float = 2.0, max_wait: float = MAX_WAIT_SECONDS) -> Iterator[float]:
    """Yield the seconds to wait before each query: 0 before the first, then 2, 4, 8 and so on, up to ``max_wait``."""
    yield 0.0
    wait = first
    while True:
        yield min(wait, max_wait)
        wait = min(wait * 2, max_wait)


def _environment(inherited: Mapping[str, str]) -> Mapping[str, str]:
    environment = {name: value for name, value in inherited.items() if not name.startswith(_FORMAT_PREFIXES)}
    return {**environment, "LC_ALL": "C"}
