"""The options of the ranks that share a model, for the commands that use one, and how these are started or joined."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, TypeVar

import click

from fugaku_gpt.cli.options import PATH, Command, options_as
from fugaku_gpt.cli.output import echo_at_once
from fugaku_gpt.cli.streamed_input import Copies, InputFile, copy_streams
from fugaku_gpt.errors import FugakuGptError, UsageError, missing_package
from fugaku_gpt.machine.rank import launched_rank, ranks_of_node

if TYPE_CHECKING:
    from fugaku_gpt.launch.rank_supervisor import SupervisorLink

T = TypeVar("T")
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
        end_token: the token that ends documents; None: as the tokenizer's files say.
        copies: streams that the process which has started this rank has read, and what they had.
        memory_check: whether what does not fit into a node's memory is refused.
    """

    ranks: Optional[int]
    tp: int
    pp: int
    threads: Optional[int]
    dtype: str
    tokenizer: Optional[Path]
    end_token: Optional[str]
    copies: Copies
    memory_check: bool


def model_ranks(function: Command) -> Command:
    """Add the options of :class:`ModelRanks` to a command, which gets them in ``model_ranks``."""
    count = click.IntRange(min=1)
    command = options_as(ModelRanks, "model_ranks")(function)
    command = click.option(
        "--copy-of",
        "copies",
        type=(PATH, PATH),
        multiple=True,
        hidden=True,
        help="On ranks that --ranks has started: a stream, and the file that has what was read from it.",
    )(command)
    command = click.option(
        "--memory-check/--no-memory-check",
        default=True,
        show_default=True,
        help="Refuse what does not fit into the memory of a node, before the model is loaded.",
    )(command)
    command = click.option("--end-token", metavar="TOKEN", help="Token that ends documents; default: as declared.")(
        command
    )
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


def start_model_ranks(options: ModelRanks, files: Sequence[InputFile] = (), *, converses: bool = False) -> None:
    """With ``--ranks``, start this command on these ranks, print their output, and end with their exit code; else
    return, as this process is a rank. Ranks that converse also get its input, and the user's Ctrl-C.

    Args:
        files: what the ranks are to read; of streams, this process reads them once for all.

    Raises:
        RunFailed: memory ran out on this machine.
        UsageError: ranks cannot be started here, or a stream cannot be read.
    """
    launched, ranks = launched_rank(), options.ranks
    if ranks in (None, 1) or (launched is not None and launched.ranks == ranks):
        return
    assert ranks is not None
    if launched is not None and launched.ranks != 1:
        raise UsageError(f"--ranks {ranks}: a launcher has started ranks already; leave --ranks out under it")
    if ranks % (options.tp * options.pp):
        product = options.tp * options.pp
        raise UsageError(f"--ranks {ranks}: --tp {options.tp} * --pp {options.pp} = {product} must divide it")
    from fugaku_gpt.launch.model_command import converse_on_ranks, start_on_ranks, thread_options

    extra = thread_options(ranks) if options.threads is None else []
    if converses:
        extra += ["--interactive"] if sys.stdin.isatty() else []
        raise click.exceptions.Exit(converse_on_ranks(_with_options(extra), ranks))
    with ExitStack() as stack:
        arguments = _with_options([*extra, *copy_streams(files, stack)])
        code = start_on_ranks(arguments, ranks, echo_at_once, lambda line: echo_at_once(line, err=True))
    raise click.exceptions.Exit(code)


def _with_options(options: Sequence[str]) -> List[str]:
    """Return the arguments of this command line with more options, which stand behind its verb: the user's own may end
    in ``--`` and arguments."""
    context = click.get_current_context()
    arguments: List[str] = context.find_root().obj
    behind = arguments.index(str(context.info_name)) + 1
    return [*arguments[:behind], *options, *arguments[behind:]]


def join_model_ranks(options: ModelRanks) -> int:
    """Prepare this process to be a rank, before PyTorch and MPI are imported; returns its number of threads."""
    from fugaku_gpt.launch.rank_variables import thread_variables
    from fugaku_gpt.machine.local import threads_of_rank

    threads = options.threads or threads_of_rank(ranks_of_node())
    os.environ.update(thread_variables(threads))
    return threads


class JoiningRank:
    """This process, which is to join MPI as a rank, or to be the only one. Under a launcher it is a child of a process
    that ends all ranks if this one ends before it has joined: the others would wait for it for ever."""

    def __init__(self) -> None:
        """Make it so, before PyTorch and MPI begin their threads."""
        self._launched = launched_rank()
        self._link: "Optional[SupervisorLink]" = None
        if self._launched is not None and self._launched.ranks != 1:
            from fugaku_gpt.launch.rank_supervisor import supervise_rank

            self._link = supervise_rank(self._launched.rank)

    def prepare(self, action: Callable[[], T]) -> T:
        """Call ``action``, which joins nothing. What it refuses ends all ranks of the launch, also where only this one
        refuses it."""
        try:
            return action()
        except (ModuleNotFoundError, UsageError) as error:
            message = missing_package(error) if isinstance(error, ModuleNotFoundError) else error
            if message is None or self._launched is None or self._link is None or self._launched.rank == 0:
                raise
            from fugaku_gpt.launch.rank_supervisor import refuse_on_one_rank

            refuse_on_one_rank(self._launched.rank, message)

    def report_joined(self) -> None:
        """Report that all ranks have joined MPI."""
        if self._link is not None:
            self._link.report_joined()


def on_joined_ranks(action: Callable[[], T]) -> T:
    """Call ``action``, which joins MPI and raises errors for the user on every rank; the first rank reports them."""
    try:
        return action()
    except FugakuGptError as error:
        if not is_first_rank():
            raise click.exceptions.Exit(error.exit_code) from None
        raise
