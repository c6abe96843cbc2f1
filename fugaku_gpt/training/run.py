"""A training run from joining the ranks to the result: what ``fugaku-gpt train`` starts on every rank."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.data.samples import open_samples
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, RunFailed, UsageError
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.machine.garbage_collection import gc_paused
from fugaku_gpt.model import recompute_of
from fugaku_gpt.records.claim import HOLDER_VARIABLE
from fugaku_gpt.records.operators import write_operators
from fugaku_gpt.records.run import INTERRUPTED, NONE, OK, STOPPED, MetricsWriter, RunDirectory
from fugaku_gpt.training.binding import bind
from fugaku_gpt.training.checkpoint import Checkpoints
from fugaku_gpt.training.failure import end_badly, result_of
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.memory_guard import MemoryGuard, processes_of_node
from fugaku_gpt.training.meter import Meter
from fugaku_gpt.training.operators import profile_operators
from fugaku_gpt.training.resume import Found, build_of, go_on, look, other_build, share
from fugaku_gpt.training.startup import (
    agree_on_kernels,
    check_precision,
    collect_environment,
    describe_environment,
    prepare_process,
    together,
)
from fugaku_gpt.training.stopping import Stop
from fugaku_gpt.training.trainer import Step, Trainer
from fugaku_gpt.training.watchdog import start_watchdog


def train(
    config: RunConfig,
    out: Path,
    threads: int,
    announce: Optional[Callable[[Path], None]] = None,
    *,
    resume: str = NONE,
    force_data: bool = False,
    judge: Optional[Callable[[List[int]], None]] = None,
) -> int:
    """Train on all ranks of this job and leave a run directory; returns the exit code.

    Args:
        announce: is told the run directory as soon as it is there.
        resume: what to go on from: ``none``, ``auto``, or a path; see :func:`fugaku_gpt.training.resume.look`.
        force_data: go on although the samples are not those of the checkpoint.
        judge: refuses a run that cannot be trained where it is, by the ranks of this node; no rank goes on where it
            raises a ``UsageError`` on any.

    Raises:
        UsageError: on every rank alike, before training has begun: ranks, data or ``out`` are not as the run needs
            them.
    """
    started = time.time()
    world = open_world(threads=threads)
    directory: Optional[RunDirectory] = None
    watching = contextlib.ExitStack()  # for signals, memory that runs out, and hangs
    starting = watching.enter_context(contextlib.ExitStack())
    try:
        starting.enter_context(gc_paused())
        stop = watching.enter_context(Stop.of_job(config.job))
        _check_ranks(config, world)
        process = {**bind(world, config.node.bind, threads), **prepare_process(threads)}
        together(world, lambda: check_precision(config))
        together(world, lambda: recompute_of(config, chunks_of(config)))  # refuses a budget into which nothing fits
        processes = processes_of_node(world)
        if judge is not None:
            refuse = judge
            together(world, lambda: refuse(list(processes)))
        train_samples = together(world, lambda: open_samples(config, "train"))
        evaluates = config.training.eval_interval is not None
        valid_samples = together(world, lambda: open_samples(config, "valid")) if evaluates else None
        out = Path(world.broadcast_json(str(out)))
        found = _look(config, out, world, resume, train_samples.fingerprint, force_data)
        if found.finished:
            if world.rank == 0:
                print(f"{out}: the run has done its {config.training.iterations} iterations: nothing to do", flush=True)
            return EXIT_OK
        agree_on_kernels(config, world, found.kernels)
        directory = _create_directory(config, out, world, found.takes_over)
        if announce is not None:
            announce(directory.path)
        guard = None
        if config.node.memory_guard:
            guard = MemoryGuard(directory, world.rank, list(processes.values()), config.node)
            watching.enter_context(guard)
        if config.node.flight_recorder or config.node.check_collectives:
            flight_dir = directory.flight_dir if config.node.flight_recorder else None
            world = open_world(flight_dir, threads, config.node.check_collectives)
        watchdog = start_watchdog(config, world, directory, started)
        if watchdog is not None:
            watching.callback(watchdog.stop)
        grid = ProcessGrid(world, config.layout)
        environment = collect_environment(config, grid, process)
        log = None
        if world.rank == 0:
            directory.write_environment({**environment, "data_fingerprint": train_samples.fingerprint})
            goes_on = directory.metrics_file.exists()
            hosts = [rank["host"] for rank in environment["ranks"]]
            log = TrainingLog(config, MetricsWriter(directory.metrics_file), sys.stdout, hosts)
            for line in describe_environment(environment):
                log.say(line)
            if goes_on and not found.candidates:
                log.resumed(0, None)
                log.say("there is no checkpoint yet: the run begins anew")
        trainer = Trainer(config, grid, train_samples, valid_samples)
        trainer.stop_wanted = stop.wanted
        build = build_of(environment) if world.rank == 0 else {}
        state = _resume(trainer, found, log, build) if found.candidates else {}
        checkpoints = Checkpoints(trainer, directory.checkpoints_dir, log, train_samples.fingerprint, build)
        if guard is not None:
            guard.tell(lambda: {**trainer.held_bytes(), "copy for checkpoints": checkpoints.copy_bytes})
        starting.close()
        try:
            stopped = run_loop(trainer, log, checkpoints, state.get("validation_loss"))
        except RunFailed:  # of every rank alike
            checkpoints.finish()  # what is being written may be what is gone on from
            raise
        trainer.finish()
        if stopped:
            reason = stop.agreed_reason(world)
            if log is not None:
                reason = f"{STOPPED}{reason}, after iteration {trainer.iteration}"
                log.say(f"{reason}; to be resumed from {directory.last_checkpoint()}")
                directory.write_result(result_of(directory, config, INTERRUPTED, reason, started), replace=False)
            return EXIT_RESUME
        if world.rank == 0:
            directory.write_result(result_of(directory, config, OK, "", started), replace=False)
        if config.training.profile_operators is not None:
            world.barrier()  # a rank that fails in it ends all of them: not before the run's result is there
            _profile(trainer, config.training.profile_operators, directory, log)
        return EXIT_OK
    except BaseException as error:
        if isinstance(error, UsageError) and directory is None:
            raise  # every rank has the same, and none waits
        end_badly(directory, world, started, error, kept=announce is not None)
        return EXIT_RUN_FAILED
    finally:
        watching.close()


def _check_ranks(config: RunConfig, world: Communicator) -> None:
    """The launcher may have started other numbers than its variables promised."""
    if world.size != config.layout.ranks:
        raise UsageError(
            f"layout.dp {config.layout.dp} * layout.tp {config.layout.tp} * layout.pp {config.layout.pp} = "
            f"{config.layout.ranks} ranks, but MPI has joined {world.size}; use the mpirun of the MPI that mpi4py "
            "was built for (`fugaku-gpt doctor` shows both)"
        )


def _look(config: RunConfig, out: Path, world: Communicator, resume: str, fingerprint: str, force_data: bool) -> Found:
    """What there is to go on from, found by rank 0."""
    found = together(world, lambda: look(config, out, resume, fingerprint, force_data) if world.rank == 0 else None)
    return share(found, world)


def _create_directory(config: RunConfig, out: Path, world: Communicator, resume: bool) -> RunDirectory:
    """The run directory, made by rank 0."""
    directory = RunDirectory(out)
    holder = os.environ.get(HOLDER_VARIABLE)  # who has started the ranks may have claimed it for them

    def make() -> None:
        if world.rank == 0:
            directory.create(dump_run_config(config), holder, resume=resume)
            directory.remove_flight_records()

    together(world, make)
    return directory


def _resume(trainer: Trainer, found: Found, log: Optional[TrainingLog], build: Mapping[str, Any]) -> Mapping[str, Any]:
    """Go on from what was found, and say so; returns the scalars that were saved."""
    before = time.perf_counter()
    path, manifest, rejected = go_on(trainer, found)
    if log is not None:
        for line in (*found.said, *rejected):
            log.say(line)
        differences = other_build(manifest.build, build)
        if differences:
            log.say(f"another build than the checkpoint's, equal to rounding only: {', '.join(differences)}")
        log.resumed(manifest.iteration, path.name)
        log.say(
            f"going on from {path.name}: iteration {manifest.iteration}, {manifest.consumed_samples} samples consumed; "
            f"loaded in {time.perf_counter() - before:.3f} s"
        )
    return manifest.state


def _profile(trainer: Trainer, iterations: int, directory: RunDirectory, log: Optional[TrainingLog]) -> None:
    """Leave in the run directory where an iteration's time goes. The run itself is done and well, and recorded: where
    this does not succeed, that is said. Where only some rank fails, it ends all ranks, and who has started them lets
    the recorded result stand (:func:`fugaku_gpt.launch.launch_result.result_of`)."""
    found, why = None, "the run is to stop, or a rank's PyTorch has no profiler that sees its operators"
    try:
        found = profile_operators(trainer, iterations)
        trainer.finish()
    except RunFailed as error:  # of every rank alike
        why = str(error)
        trainer.finish()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        world = trainer.grid.world
        if world.size > 1:  # the others may be waiting for this one
            said = f"fugaku-gpt: rank {world.rank}: operators were not profiled: {why}; the run itself has ended well"
            print(said, file=sys.stderr, flush=True)
            world.abort(EXIT_RUN_FAILED)
    if log is None:
        return
    if found is None:
        log.say(f"operators were not profiled: {why}")
        return
    try:
        write_operators(directory.path, found)
    except OSError as error:
        log.say(f"operators were profiled, but cannot be written to {directory.path}: {error.strerror}")
    shares = sorted(((seconds / found.seconds_per_iteration, name) for name, seconds in found.classes.items()))
    log.say(
        f"operators of {iterations} more iterations, {found.slowdown:.2f} times as long by being profiled: "
        + ", ".join(f"{name} {share:.1%}" for share, name in reversed(shares) if share >= 0.0005)
    )


def run_loop(
    trainer: Trainer,
    log: Optional[TrainingLog] = None,
    checkpoints: Optional[Checkpoints] = None,
    validated: Optional[float] = None,
) -> bool:
    """The iterations that are left. Every rank makes the same calls: what is logged is summed here, not where it is
    printed.

    Args:
        validated: loss of the last validation, of a run that goes on.

    Returns:
        whether the run was stopped before its end, as some rank wanted.

    Raises:
        RunFailed: on every rank alike: the run stops, or the checkpoint of its end could not be written.
    """
    training, checkpointing = trainer.config.training, trainer.config.checkpoint
    if training.eval_interval is not None and trainer.iteration == 0:
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
        ends = iteration == training.iterations
        if iteration % training.log_interval == 0 or ends:
            measured = meter.read(len(steps))  # waits for the slowest rank, whose time is the iteration's
            if log is not None:
                consumed = trainer.consumed_samples, trainer.consumed_tokens
                log.iteration(iteration, steps, consumed, trainer.health.left_out, measured)
            steps = []
        # an iteration's time is without validation and without what saving makes it wait
        before = time.perf_counter()
        if training.eval_interval is not None and (iteration % training.eval_interval == 0 or ends):
            validated = _validate(trainer, log, validated)
            trainer.grid.world.barrier()
        if checkpoints is not None:
            checkpoints.advance(step)
            must = checkpointing.at_end if ends else step.stop
            if must or checkpoints.due(iteration):
                known = validated if validated is not None and math.isfinite(validated) else None
                checkpoints.save({"validation_loss": known}, wait=must)
        if step.stop and not ends:
            return True
        meter.since += time.perf_counter() - before
    if checkpoints is not None:
        checkpoints.finish()
    return False


def _validate(trainer: Trainer, log: Optional[TrainingLog], previous: Optional[float]) -> float:
    loss = trainer.validate()
    if log is not None:
        training = trainer.config.training
        tokens = training.eval_batches * training.global_batch * trainer.config.model.seq_len
        log.validation(trainer.iteration, loss, tokens, previous)
    return loss
