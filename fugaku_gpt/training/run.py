"""A training run from joining the ranks to the result: what ``fugaku-gpt train`` starts on every rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Callable, List, Optional, TypeVar

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.data.samples import open_samples
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError
from fugaku_gpt.records.claim import HOLDER_VARIABLE
from fugaku_gpt.records.run import OK, MetricsWriter, RunDirectory
from fugaku_gpt.training.binding import bind
from fugaku_gpt.training.failure import end_badly, result_of
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.meter import Meter
from fugaku_gpt.training.startup import (
    agree_on_kernels,
    check_precision,
    collect_environment,
    describe_environment,
    prepare_process,
)
from fugaku_gpt.training.trainer import Step, Trainer

T = TypeVar("T")


def train(config: RunConfig, out: Path, threads: int, announce: Optional[Callable[[Path], None]] = None) -> int:
    """Train on all ranks of this job and leave a run directory; returns the exit code.

    Args:
        announce: is told the run directory as soon as it is there.

    Raises:
        UsageError: on every rank alike, before training has begun: ranks, data or ``out`` are not as the run needs
            them.
    """
    started = time.time()
    world = open_world(threads=threads)
    directory: Optional[RunDirectory] = None
    try:
        _check_ranks(config, world)
        process = {**bind(world, config.node.bind, threads), **prepare_process(threads)}
        _together(world, lambda: check_precision(config))
        agree_on_kernels(config, world)
        train_samples = _together(world, lambda: open_samples(config, "train"))
        evaluates = config.training.eval_interval is not None
        valid_samples = _together(world, lambda: open_samples(config, "valid")) if evaluates else None
        directory = _create_directory(config, out, world)
        if announce is not None:
            announce(directory.path)
        if config.node.flight_recorder:
            world = open_world(directory.flight_dir, threads)
        environment = collect_environment(config, world, process)
        log = None
        if world.rank == 0:
            directory.write_environment({**environment, "data_fingerprint": train_samples.fingerprint})
            log = TrainingLog(config, MetricsWriter(directory.metrics_file), sys.stdout)
            for line in describe_environment(environment):
                log.say(line)
        trainer = Trainer(config, ProcessGrid(world, config.layout), train_samples, valid_samples)
        _loop(trainer, log)
        trainer.finish()
        if world.rank == 0:
            directory.write_result(result_of(directory, config, OK, "", started), replace=False)
        return EXIT_OK
    except BaseException as error:
        if isinstance(error, UsageError) and directory is None:
            raise  # every rank has the same, and none waits
        end_badly(directory, world, started, error, kept=announce is not None)
        return EXIT_RUN_FAILED


def _check_ranks(config: RunConfig, world: Communicator) -> None:
    """The launcher may have started other numbers than its variables promised."""
    if world.size != config.layout.ranks:
        raise UsageError(
            f"layout.dp {config.layout.dp} * layout.tp {config.layout.tp} * layout.pp {config.layout.pp} = "
            f"{config.layout.ranks} ranks, but MPI has joined {world.size}; use the mpirun of the MPI that mpi4py "
            "was built for (`fugaku-gpt doctor` shows both)"
        )


def _create_directory(config: RunConfig, out: Path, world: Communicator) -> RunDirectory:
    """The run directory that rank 0 names, made by rank 0."""
    directory = RunDirectory(Path(world.broadcast_json(str(out))))
    holder = os.environ.get(HOLDER_VARIABLE)  # who has started the ranks may have claimed it for them
    _together(world, lambda: directory.create(dump_run_config(config), holder) if world.rank == 0 else None)
    return directory


def _loop(trainer: Trainer, log: Optional[TrainingLog]) -> None:
    """All iterations. Every rank makes the same calls: what is logged is summed here, not where it is printed."""
    training = trainer.config.training
    validated: Optional[float] = None
    if training.eval_interval is not None:
        validated = _validate(trainer, log, validated)
    trainer.grid.world.barrier()
    meter = Meter(trainer)
    steps: List[Step] = []  # since the last line
    keeps = False
    while trainer.iteration < training.iterations:
        step = trainer.step()
        steps.append(step)
        iteration = trainer.iteration
        if log is not None and step.left_out:
            log.left_out(iteration, step)
        if log is not None and trainer.copy_bytes and not keeps:
            keeps = True
            log.say(
                f"a copy of weights and optimiser state for loss spikes, every {training.rollback_every} iterations, "
                f"takes {trainer.copy_bytes / 2**20:.1f} MiB of rank 0"
            )
        if iteration % training.log_interval == 0 or iteration == training.iterations:
            measured = meter.read(len(steps))  # waits for the slowest rank, whose time is the iteration's
            if log is not None:
                consumed = trainer.consumed_samples, trainer.consumed_tokens
                log.iteration(iteration, steps, consumed, trainer.health.left_out, measured)
            steps = []
        if training.eval_interval is not None and (
            iteration % training.eval_interval == 0 or iteration == training.iterations
        ):
            before = time.perf_counter()
            validated = _validate(trainer, log, validated)
            trainer.grid.world.barrier()
            meter.since += time.perf_counter() - before  # an iteration's time is without validation


def _validate(trainer: Trainer, log: Optional[TrainingLog], previous: Optional[float]) -> float:
    loss = trainer.validate()
    if log is not None:
        training = trainer.config.training
        tokens = training.eval_batches * training.global_batch * trainer.config.model.seq_len
        log.validation(trainer.iteration, loss, tokens, previous)
    return loss


def _together(world: Communicator, action: Callable[[], T]) -> T:
    """Do something on every rank that may fail on some: a failure anywhere is raised everywhere, so that nobody waits.

    Raises:
        UsageError: the first rank's message, with its rank where rank 0 had no such trouble.
    """
    problem: Optional[str] = None
    value: Optional[T] = None
    try:
        value = action()
    except UsageError as error:
        problem = str(error)
    problems = world.gather_json(problem)
    first = None
    if problems is not None:
        first = next(((f"rank {rank}: " if rank else "") + text for rank, text in enumerate(problems) if text), None)
    first = world.broadcast_json(first)
    if first is not None:
        raise UsageError(first)
    return value  # type: ignore[return-value]  # set: no rank had a problem
