"""``fugaku-gpt train``: under ``mpirun`` it joins its ranks; with ``--ranks N`` it starts them."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

import click

from fugaku_gpt.cli.options import PATH, data_option, data_overrides, options_as, run_source
from fugaku_gpt.cli.output import echo, echo_at_once
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import LOG_FORMATS
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import (
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_USAGE,
    UsageError,
    missing_package,
)
from fugaku_gpt.formulas.parameters import run_name
from fugaku_gpt.launch.rank_variables import thread_variables
from fugaku_gpt.launch.run_to_train import refuse_inside_launch, run_to_train
from fugaku_gpt.machine.garbage_collection import gc_paused
from fugaku_gpt.machine.local import threads_of_rank
from fugaku_gpt.machine.rank import LaunchedRank, launched_rank
from fugaku_gpt.records.run import NONE

_LEAST_OPEN_FILES = 64


@dataclass(frozen=True)
class SettingOptions:
    """Options of ``train`` that set a field of the run each."""

    data: Optional[str]
    hang_timeout: Optional[float]
    check_collectives: bool
    log_format: Optional[str]
    verbose: bool

    def overrides(self) -> List[str]:
        """Return the overrides that the options stand for.

        Raises:
            UsageError: two options contradict each other.
        """
        log_format = "megatron" if self.verbose else self.log_format
        if self.verbose and self.log_format not in (None, log_format):
            raise UsageError(f"--verbose prints the lines of --log-format {log_format}; leave one of the two out")
        overrides = data_overrides(self.data)
        overrides += [f"node.hang_timeout={self.hang_timeout}"] if self.hang_timeout is not None else []
        overrides += ["node.check_collectives=true"] if self.check_collectives else []
        return overrides + ([f"training.log_format={log_format}"] if log_format is not None else [])


@click.command()
@run_source(settings_help="Override a setting, such as training.lr=1e-4; repeatable.")
@data_option
@click.option("--out", type=PATH, help="Run directory; default: runs/<name>-<time>.")
@click.option(
    "--resume",
    default=NONE,
    show_default=True,
    metavar="auto|none|PATH",
    help="Resume in --out from its newest valid checkpoint, if there is one; or from the checkpoint or run at PATH.",
)
@click.option("--force-data", is_flag=True, help="Resume even if the corpus is not that of the checkpoint.")
@click.option(
    "--hang-timeout",
    type=float,
    metavar="SECONDS",
    help="End the run when no rank has made progress for this long; sets node.hang_timeout.",
)
@click.option("--check-collectives", is_flag=True, help="Compare MPI calls between ranks; sets node.check_collectives.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Start this many ranks with mpirun on this machine; they are data parallel unless the run sets layout.dp.",
)
@click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    help="Print short lines, or Megatron-LM's, with all figures; sets training.log_format.",
)
@click.option("--verbose", is_flag=True, help="Print all figures of each iteration: --log-format megatron.")
@options_as(SettingOptions, "settings")
def train(
    source: RunSource,
    settings: SettingOptions,
    out: Optional[Path],
    resume: str,
    force_data: bool,
    ranks: Optional[int],
) -> None:
    """Train the GPT that RUN.yaml, a preset and overrides describe, and write a run directory.

    Under `mpirun -n N fugaku-gpt train ...` the processes are the ranks; with --ranks N, this command starts mpirun;
    with neither, one rank trains alone.

    Exit codes: 0 the run has ended well, 1 it failed, 2 usage or config error, 75 stopped with a checkpoint and
    resumable, 128 + N ended by signal N.
    """
    launched = launched_rank()
    if ranks is not None and launched is not None:
        _refuse_inside_launch(ranks, launched)
    try:
        run = run_to_train(source, settings.overrides(), out, ranks, resume)
        if launched is None or launched.rank == 0:
            for note in run.notes:
                echo(f"fugaku-gpt: note: {note}", err=True)
        if run.replicas_note:
            echo(run.replicas_note)
        config = run.config
    except UsageError as error:
        if launched is not None and launched.ranks != 1:
            from fugaku_gpt.launch.rank_supervisor import refuse_launch

            refuse_launch(launched.rank, error)
        raise
    out = out if out is not None else Path("runs") / f"{run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if ranks is not None:
        _start_ranks(config, out, resume, force_data)
    _join_ranks(config, out, launched, resume, force_data)


def _refuse_inside_launch(ranks: int, launched: LaunchedRank) -> None:
    """Refuse ``--ranks`` on a rank of a launch, as each would start ranks of its own; a launch of one may."""
    if launched.ranks == 1:
        return
    if launched.rank != 0:  # rank 0 reports it
        raise click.exceptions.Exit(EXIT_USAGE)
    refuse_inside_launch(ranks)


def _start_ranks(config: RunConfig, out: Path, resume: str, force_data: bool) -> None:
    # imported here, as in _join_ranks: ten thousand ranks must not import what starts them
    from fugaku_gpt.launch.local_run import is_complete, train_on_this_machine
    from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large

    if is_complete(out, config, resume):
        echo(f"{out}: the run has done its {config.training.iterations} iterations: nothing left to do")
        raise click.exceptions.Exit(EXIT_OK)

    def check() -> None:
        refuse_too_large(config, local_node_limits(), range(config.layout.ranks))

    run = train_on_this_machine(config, out, check, resume, force_data, echo_at_once)
    if run.problem:
        echo(f"fugaku-gpt: {run.problem}", err=True)
    if run.warning:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            echo(f"fugaku-gpt: {run.warning}", err=True)
    run.raise_if_ended()
    raise click.exceptions.Exit(run.code)


def _join_ranks(config: RunConfig, out: Path, launched: Optional[LaunchedRank], resume: str, force_data: bool) -> None:
    threads = config.node.threads_per_rank or threads_of_rank(config.ranks_per_node)
    os.environ.update(thread_variables(threads))  # read when the libraries are loaded, just below
    link = None
    if launched is not None:
        from fugaku_gpt.launch.rank_supervisor import supervise_rank

        link = supervise_rank(launched.rank, out)  # before torch and MPI begin their threads
    try:
        _require_open_files()
        with gc_paused():
            from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large
            from fugaku_gpt.training.run import train as train_on_this_rank
    except (ModuleNotFoundError, UsageError) as error:
        message = missing_package(error) if isinstance(error, ModuleNotFoundError) else error
        if message is None or launched is None or launched.ranks == 1:
            raise
        # the other ranks may be able to: their nodes may have what this one lacks
        from fugaku_gpt.launch.rank_supervisor import print_refusal

        print_refusal(launched.rank, message)
        raise click.exceptions.Exit(EXIT_RUN_FAILED) from None
    try:
        machine = local_node_limits()
        code = train_on_this_rank(
            config,
            out,
            threads,
            link.report_directory if link is not None else None,
            on_joined=link.report_joined if link is not None else None,
            resume=resume,
            force_data=force_data,
            check_node=lambda ranks: refuse_too_large(config, machine, ranks),
        )
    except UsageError:
        if launched is not None and launched.rank != 0:
            raise click.exceptions.Exit(EXIT_USAGE) from None
        raise
    except Exception:
        if link is None or link.has_joined:
            raise
        # what libraries do at the end of a process can wait for ever for what has failed here
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_RUN_FAILED)
    raise click.exceptions.Exit(code)


def _require_open_files() -> None:
    """Refuse a limit of open files below which libraries fail in ways that name no cause, or wait for ever.

    Raises:
        UsageError: the limit is too low.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < _LEAST_OPEN_FILES:
        raise UsageError(
            f"ulimit -n: {limit} open files; PyTorch and MPI need {_LEAST_OPEN_FILES} at least, better 1024"
        )
