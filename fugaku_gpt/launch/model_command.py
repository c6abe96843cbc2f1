"""Runs a command that uses a trained model on ranks of this machine, and gathers its output."""

from __future__ import annotations

import sys
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.errors import RunFailed
from fugaku_gpt.launch.conversation import run_conversation
from fugaku_gpt.launch.launcher import exit_code_of, find_launcher, require_rank_packages
from fugaku_gpt.launch.processes import OnLine, Outcome, SeparateStreams, run_command
from fugaku_gpt.machine.local import usable_cores

_ERROR, _NO_ERRORS = "fugaku-gpt: ", ("note: ", "warning: ")


class EndedCommand(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit code.
        output: the lines of its standard output.
        errors: the lines of its standard error.
        stopped_by: the signal to this process for which it was ended, or None.
    """

    code: int
    output: Tuple[str, ...]
    errors: Tuple[str, ...]
    stopped_by: Optional[int] = None

    @property
    def message(self) -> str:
        """The errors that it has reported; else the end of its standard error."""
        reports = [line[len(_ERROR) :] for line in self.errors if line.startswith(_ERROR)]
        messages = [line for line in reports if not line.startswith(_NO_ERRORS)]
        return "\n".join(messages or self.errors[-5:]) or f"exit code {self.code}"


def thread_options(ranks: int) -> List[str]:
    """The options by which each of some ranks of this machine has its share of the cores as threads."""
    return ["--threads", str(max(1, len(usable_cores()) // ranks))]


def command_on_ranks(arguments: Sequence[str], ranks: int) -> Tuple[List[str], Dict[str, str]]:
    """Return the command that starts this program on ranks of this machine, and the variables that it needs.

    Args:
        arguments: its command line.
        ranks: their number.

    Raises:
        UsageError: ranks cannot be started here.
        ModuleNotFoundError: this Python lacks a package that ranks need.
    """
    require_rank_packages()
    launcher = find_launcher()
    return [*launcher.command_prefix(ranks), sys.executable, "-m", "fugaku_gpt", *arguments], launcher.environment


def start_on_ranks(arguments: Sequence[str], ranks: int, on_output: OnLine, on_error: OnLine) -> int:
    """Start this program on ranks, wait for their end, and return the exit code; arguments and further errors: see
    :func:`command_on_ranks`.

    Args:
        on_output, on_error: called with the lines that they print.

    Raises:
        RunFailed: memory ran out on this machine.
    """
    return _code_of(run_command(*command_on_ranks(arguments, ranks), on_line=SeparateStreams(on_output, on_error)))


def converse_on_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Start this program on ranks that read this process's input and print where it prints, wait for their end, and
    return the exit code; arguments and errors: see :func:`start_on_ranks`."""
    return _code_of(run_conversation(*command_on_ranks(arguments, ranks)))


def _code_of(outcome: Outcome) -> int:
    if outcome.oom_kills:
        raise RunFailed(f"out of memory: {outcome.oom_kills} processes killed by the kernel; use fewer texts (--batch)")
    return exit_code_of(outcome)


def run_model_command(arguments: Sequence[str], ranks: int = 1, threads: Optional[int] = None) -> EndedCommand:
    """Run this program on ranks, and gather what it prints; arguments and errors: see :func:`start_on_ranks`."""
    output: List[str] = []
    errors: List[str] = []
    stated = ["--threads", str(threads)] if threads is not None else thread_options(ranks)
    command = command_on_ranks([*arguments, *stated, "--ranks", str(ranks)], ranks)
    outcome = run_command(*command, on_line=SeparateStreams(output.append, errors.append))
    return EndedCommand(_code_of(outcome), tuple(output), tuple(errors), outcome.stopped_by)
