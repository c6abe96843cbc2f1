"""``fugaku-gpt train``: under ``mpirun`` it joins its ranks; with ``--ranks N`` it starts them."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

import click

from fugaku_gpt.cli.corpus_settings import with_corpus_settings
from fugaku_gpt.cli.options import PATH, RunSource, data_option, data_overrides, options_as, run_source
from fugaku_gpt.cli.output import echo, echo_at_once
from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.config.schema import LOG_FORMATS
from fugaku_gpt.errors import (
    EXIT_OK,
    EXIT_RESUME,
    EXIT_RUN_FAILED,
    EXIT_USAGE,
    RunFailed,
    UsageError,
    missing_package,
)
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.launch.rank_variables import thread_variables
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.machine.garbage_collection import gc_paused
from fugaku_gpt.machine.local import threads_of_rank
from fugaku_gpt.machine.rank import LaunchedRank, launched_rank
from fugaku_gpt.records.run import AUTO, NONE, OK, REFUSED, RunDirectory, resumes_in_same_folder

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
        overrides = settings.overrides()
        if ranks is not None and "layout.dp" not in source.written_keys():
            overrides += _data_parallel(source.load(*overrides, check=False), ranks)
        config = source.load(*overrides)
        resume_from = out if resume == AUTO else Path(resume) if resume != NONE else None
        config, notes = with_corpus_settings(source, config, overrides, resume_from)
        if launched is None or launched.rank == 0:
            for note in notes:
                echo(f"fugaku-gpt: note: {note}", err=True)
        if ranks is not None and ranks != config.layout.ranks:
            raise UsageError(_wrong_ranks_message(config, ranks))
        if resume == AUTO and out is None:
            raise UsageError("--resume auto: needs --out, the run directory to resume in")
    except UsageError as error:
        if launched is not None and launched.ranks != 1:
            from fugaku_gpt.launch.rank_supervisor import refuse_launch

            refuse_launch(launched.rank, error)
        raise
    out = out if out is not None else Path("runs") / f"{_run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if ranks is not None:
        _start_ranks(config, out, resume, force_data)
    _join_ranks(config, out, launched, resume, force_data)


def _data_parallel(config: RunConfig, ranks: int) -> List[str]:
    """Return the override that makes data-parallel replicas of the ranks that the run leaves over; prints it."""
    layout = config.layout
    replicas, rest = divmod(ranks, layout.tp * layout.pp)
    if rest or replicas in (0, layout.dp):
        return []
    echo(f"{ranks} ranks, and layout.dp is not set: layout.dp={replicas}")
    return [f"layout.dp={replicas}"]


def _refuse_inside_launch(ranks: int, launched: LaunchedRank) -> None:
    """Refuse ``--ranks`` on a rank of a launch, as each would start ranks of its own; a launch of one may."""
    if launched.ranks == 1:
        return
    if launched.rank != 0:  # rank 0 reports it
        raise click.exceptions.Exit(EXIT_USAGE)
    count = f"{launched.ranks} ranks" if launched.ranks is not None else "this rank"
    variables = " and ".join(launched.variables)
    raise UsageError(
        f"--ranks {ranks}: a launcher has started {count}, by {variables}; leave --ranks out under it, or unset these"
    )


def _start_ranks(config: RunConfig, out: Path, resume: str, force_data: bool) -> None:
    directory, mark = RunDirectory(out), uuid.uuid4().hex
    in_same_folder = resumes_in_same_folder(directory, resume)
    if in_same_folder and directory.has_finished(config.training.iterations):
        echo(f"{out}: the run has done its {config.training.iterations} iterations: nothing left to do")
        raise click.exceptions.Exit(EXIT_OK)
    # imported here, as in _join_ranks: ten thousand ranks must not import what starts them
    from fugaku_gpt.launch.launch_result import result_of_launch
    from fugaku_gpt.launch.launcher import exit_code_of, launch, require_rank_packages
    from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large

    require_rank_packages()
    refuse_too_large(config, local_node_limits(), range(config.layout.ranks))
    arguments = ([] if resume == NONE else ["--resume", resume]) + (["--force-data"] if force_data else [])
    directory.create(dump_run_config(config), mark, resume=in_same_folder)
    started, log = steady_time(), directory.log_file
    try:
        outcome = launch(config, directory, arguments, timeout=config.job.elapse, on_line=echo_at_once, mark=mark)
    except UsageError:
        directory.discard()
        raise
    result = result_of_launch(directory, config, outcome, log, started)
    code = exit_code_of(outcome, result)
    if result.status == REFUSED:
        directory.discard()
    else:
        try:
            directory.write_result(result)  # changes nothing where the ranks have recorded just this
        except OSError as error:  # such as a disk that is full, which may be why the run has failed
            code = code or EXIT_RUN_FAILED
            message = f"{error.filename}: cannot be read or written: {error.strerror}; the run's end: {result.status}"
            echo(f"fugaku-gpt: {message}{f', {result.reason}' if result.reason else ''}", err=True)
    # a process was killed after the run was complete, or the ranks have stopped as their launcher was lost
    is_late = (result.status == OK and result.reason) or (outcome.lost_reason and code == EXIT_RESUME)
    if result.reason and (outcome.stopped_by is not None or outcome.signal is not None or is_late):
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            echo(f"fugaku-gpt: {result.reason}", err=True)
    if outcome.lost_reason and code not in (EXIT_OK, EXIT_RESUME):
        raise RunFailed(f"{out}: {outcome.lost_reason}")
    if outcome.timed_out and code not in (EXIT_OK, EXIT_RESUME):
        raise RunFailed(f"{out}: stopped at its time limit of {config.job.elapse:g} s; raise job.elapse")
    raise click.exceptions.Exit(code)


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


def _run_name(config: RunConfig) -> str:
    layout = config.layout
    return config.job.name or f"{size_name(config.model)}-dp{layout.dp}-tp{layout.tp}-pp{layout.pp}"


def _wrong_ranks_message(config: RunConfig, ranks: int) -> str:
    layout = config.layout
    return (
        f"layout.dp {layout.dp} * layout.tp {layout.tp} * layout.pp {layout.pp} = {layout.ranks} ranks, "
        f"but there are {ranks}; "
        f"valid: {layout.ranks} ranks, or --set layout.dp=... and layout.tp=... that make {ranks}"
    )
