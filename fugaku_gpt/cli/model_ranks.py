"""The options of the ranks that share a model, for the commands that use one, and how these are started or joined."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Sequence, TypeVar

import click

from fugaku_gpt.cli.options import PATH, Command, options_as
from fugaku_gpt.cli.output import echo
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, UsageError
from fugaku_gpt.machine.rank import launched_rank

F = TypeVar("F", bound=Command)
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelRanks:
    """How ranks share a model.

    Attributes:
        ranks: ranks to start on this machine; None: this process, or those that a launcher has started.
        tp, pp: tensor- and pipeline-parallel ranks; the rest are further replicas.
        threads: threads of each rank; None: its share of the cores.
        dtype: type in which it is computed.
        tokenizer: a ``tokenizer.json`` or its folder; None: the model's.
    """

    ranks: Optional[int]
    tp: int
    pp: int
    threads: Optional[int]
    dtype: str
    tokenizer: Optional[Path]


def model_ranks(function: Command) -> Command:
    """Add the options of :class:`ModelRanks` to a command, which gets them in ``model_ranks``."""
    count = click.IntRange(min=1)
    command = options_as(ModelRanks, "model_ranks")(function)
    command = click.option(
        "--tokenizer", type=PATH, metavar="FILE", help="A tokenizer.json, or its folder; default: that of the model."
    )(command)
    command = click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default=DTYPES[0],
        show_default=True,
        help="Type in which the model computes.",
    )(command)
    command = click.option("--threads", type=count, help="Threads of each rank; default: its share of the cores.")(
        command
    )
    command = click.option("--pp", type=count, default=1, show_default=True, help="Pipeline stages of the model.")(
        command
    )
    command = click.option(
        "--tp", type=count, default=1, show_default=True, help="Tensor-parallel ranks that share each layer."
    )(command)
    return click.option(
        "--ranks", type=count, help="Start this many ranks on this machine; those beyond tp * pp are further replicas."
    )(command)


def is_first_rank() -> bool:
    """Whether this process prints: the first rank, or the only process."""
    launched = launched_rank()
    return launched is None or launched.rank == 0


def start_model_ranks(options: ModelRanks) -> None:
    """With ``--ranks``, start this command on these ranks, print their output, and end with their exit code; else
    return, as this process is a rank.

    Raises:
        UsageError: ranks cannot be started here.
    """
    launched, ranks = launched_rank(), options.ranks
    if ranks is None:
        return
    if launched is not None and launched.ranks != 1:
        if launched.rank != 0:  # rank 0 reports it
            raise click.exceptions.Exit(EXIT_USAGE)
        raise UsageError(f"--ranks {ranks}: a launcher has started ranks already; leave --ranks out under it")
    if ranks % (options.tp * options.pp):
        product = options.tp * options.pp
        raise UsageError(f"--ranks {ranks}: --tp {options.tp} * --pp {options.pp} = {product} must divide it")
    if ranks == 1:
        return
    from fugaku_gpt.launch.launcher import find_launcher, require_rank_packages
    from fugaku_gpt.launch.processes import SeparateStreams, run_command
    from fugaku_gpt.launch.rank_variables import thread_variables
    from fugaku_gpt.machine.local import usable_cores

    require_rank_packages()
    launcher = find_launcher()
    threads = options.threads or max(1, len(usable_cores()) // ranks)
    arguments = _without_ranks(sys.argv[1:])
    argv = [*launcher.command_prefix(ranks), sys.executable, "-m", "fugaku_gpt", *arguments]
    environment = {**launcher.environment, **thread_variables(threads)}
    outcome = run_command(argv, environment, on_line=SeparateStreams(echo, lambda line: echo(line, err=True)))
    if outcome.stopped_by is not None:
        raise click.exceptions.Exit(128 + outcome.stopped_by)
    is_known = outcome.exit_code in (EXIT_OK, EXIT_USAGE)
    raise click.exceptions.Exit(outcome.exit_code if is_known else EXIT_RUN_FAILED)


def join_model_ranks(options: ModelRanks) -> int:
    """Prepare this process to be a rank, before PyTorch and MPI are imported; returns its number of threads."""
    from fugaku_gpt.launch.rank_variables import thread_variables
    from fugaku_gpt.machine.local import threads_of_rank

    launched = launched_rank()
    ranks = launched.ranks if launched is not None and launched.ranks is not None else 1
    threads = options.threads or int(os.environ.get("OMP_NUM_THREADS", "0")) or threads_of_rank(ranks)
    os.environ.update(thread_variables(threads))
    return threads


def refused_on_every_rank(action: Callable[[], None]) -> None:
    """Call ``action``; a usage error on ranks other than the first ends them without a message, since all have it."""
    try:
        action()
    except UsageError:
        if not is_first_rank():
            raise click.exceptions.Exit(EXIT_USAGE) from None
        raise


def _without_ranks(arguments: Sequence[str]) -> List[str]:
    """The arguments of this command without ``--ranks N`` or ``--ranks=N``."""
    kept: List[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument == "--ranks":
            skips = True
        elif not argument.startswith("--ranks="):
            kept.append(argument)
    return kept
