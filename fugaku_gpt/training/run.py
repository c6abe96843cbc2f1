"""A training run from joining the ranks to the result, as ``fugaku-gpt train`` starts it on every rank."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional

from fugaku_gpt.checkpoint.directory import require_room
from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.config.checks import has_validation_part
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, RunFailed, UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.layout.shards import logical_shapes
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.machine.garbage_collection import gc_paused
from fugaku_gpt.machine.job_limit import job_limits
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.model import recompute_of
from fugaku_gpt.records.claim import HOLDER_VARIABLE
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.operators import write_operators
from fugaku_gpt.records.run import INTERRUPTED, NONE, OK, STOPPED, RunDirectory
from fugaku_gpt.training.binding import bind
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.closing import closing_lines, resume_command, starts_ranks
from fugaku_gpt.training.eval_files import open_eval_files
from fugaku_gpt.training.failure import end_failed_run, run_result
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.memory_guard import MemoryGuard, processes_of_node
from fugaku_gpt.training.meter import Meter
from fugaku_gpt.training.operators import profile_operators
from fugaku_gpt.training.resume import (
    ResumePlan,
    broadcast_plan,
    build_differences,
    build_record,
    find_checkpoint,
    resume_from,
)
from fugaku_gpt.training.startup import (
    agree_on_kernels,
    check_precision,
    collect_environment,
    collective_try,
    describe_environment,
    prepare_process,
)
from fugaku_gpt.training.state import KINDS
from fugaku_gpt.training.stopping import StopRequest
from fugaku_gpt.training.trace import NEVER, StepTracer
from fugaku_gpt.training.trainer import Step, Trainer
from fugaku_gpt.training.validation import Validation
from fugaku_gpt.training.watchdog import start_watchdog
from fugaku_gpt.training.workload import open_sources, share_orders


def train(
    config: RunConfig,
    out: Path,
    threads: int,
    on_directory_created: Optional[Callable[[Path], None]] = None,
    *,
    on_joined: Optional[Callable[[], None]] = None,
    resume: str = NONE,
    force_data: bool = False,
    check_node: Optional[Callable[[List[int]], None]] = None,
) -> int:
    """Train on all ranks of this job and leave a run directory; returns the exit code.

    Args:
        on_directory_created: called with the run directory as soon as it exists.
        on_joined: called once all ranks have joined MPI.
        resume: ``none``, ``auto``, or a path to resume from; see
            :func:`fugaku_gpt.training.resume.find_checkpoint`.
        force_data: resume although the samples are not those of the checkpoint.
        check_node: called with the ranks of this node; raises a ``UsageError`` if they cannot train here, which stops
            all ranks.

    Raises:
        UsageError: ranks, data or ``out`` are not as the run needs them; raised on every rank, before training begins.
    """
    started = steady_time()
    world = open_world(threads=threads)
    if on_joined is not None:
        on_joined()
    directory: Optional[RunDirectory] = None
    watchers = contextlib.ExitStack()  # signals, the memory guard, and the hang watchdog
    start_up = watchers.enter_context(contextlib.ExitStack())
    try:
        start_up.enter_context(gc_paused())
        stop = watchers.enter_context(StopRequest.for_job(config.job))
        for limit in job_limits(config.job):
            if world.rank == 0 and limit.is_past():
                print(f"the time limit of {limit} is past: ignored", flush=True)
        _check_ranks(config, world)
        process = {**bind(world, config.node.bind, threads), **prepare_process(threads)}
        collective_try(world, lambda: check_precision(config))
        collective_try(
            world, lambda: recompute_of(config, chunks_of(config))
        )  # refuses a memory budget into which nothing fits
        processes = processes_of_node(world)
        if check_node is not None:
            check = check_node
            collective_try(world, lambda: check(list(processes)))
        validates = config.training.eval_interval is not None and has_validation_part(config)
        train_samples, valid_samples, data_lines = collective_try(world, lambda: open_sources(config, validates))
        eval_files = open_eval_files(config, world)
        out = Path(world.broadcast_json(str(out)))
        plan = _find_checkpoint(config, out, world, resume, train_samples.has_fingerprint, force_data)
        if plan.is_finished:
            if world.rank == 0:
                print(
                    f"{out}: the run has done its {config.training.iterations} iterations: nothing left to do",
                    flush=True,
                )
            return EXIT_OK
        if config.checkpoint.at_end or config.checkpoint.interval is not None:
            collective_try(world, lambda: _require_room_for_checkpoint(config, out) if world.rank == 0 else None)
        agree_on_kernels(config, world, plan.kernels)
        directory = _create_directory(config, out, world, plan.in_same_directory)
        if on_directory_created is not None:
            on_directory_created(directory.path)
        guard = None
        if config.node.memory_guard:
            guard = MemoryGuard(directory, world.rank, list(processes.values()), config.node)
            watchers.enter_context(guard)
        if config.node.flight_recorder or config.node.check_collectives:
            flight_dir = directory.flight_dir if config.node.flight_recorder else None
            world = open_world(flight_dir, threads, config.node.check_collectives)
        data_lines += share_orders(world, directory.order_dir, (train_samples, valid_samples))
        watchdog = start_watchdog(config, world, directory, started)
        if watchdog is not None:
            watchers.callback(watchdog.stop)
        grid = ProcessGrid(world, config.layout, kv_copies=config.kv_copies)
        environment = collect_environment(config, grid, process)
        log = None
        if world.rank == 0:
            directory.write_environment({**environment, "data_fingerprint": train_samples.fingerprint})
            is_resumed = directory.metrics_file.exists()
            hosts = [rank["host"] for rank in environment["ranks"]]
            log = TrainingLog(config, _metrics_writer(config, directory), sys.stdout, hosts)
            for line in (*describe_environment(environment), *data_lines):
                log.print_line(line)
            if is_resumed and not plan.candidates:
                log.resumed(0, None, 0)
                log.print_line("there is no checkpoint yet: the run begins anew")
        trainer = Trainer(config, grid, train_samples, valid_samples)
        trainer.should_stop = stop.should_stop
        build = build_record(environment) if world.rank == 0 else {}
        state = _resume(trainer, plan, log, build) if plan.candidates else {}
        checkpoints = CheckpointSaver(trainer, directory.checkpoints_dir, log, train_samples.fingerprint, build)
        if guard is not None:
            guard.set_memory_by_category(
                lambda: {**trainer.memory_by_category(), "copy for checkpoints": checkpoints.copy_bytes}
            )
        fingerprint = valid_samples.fingerprint if valid_samples is not None else ""
        validation = Validation(trainer, log, eval_files, state, fingerprint)
        validation.on_measured, stop.time_before_next_step = stop.leave_out, validation.time_before_next_step
        tracer = None
        if config.training.traced is not None:
            batches = eval_files.batches(config) if eval_files is not None else 0
            tracer = StepTracer(trainer, directory.trace_dir, log, batches)
            watchers.callback(tracer.close)
        start_up.close()
        try:
            stopped = run_loop(trainer, log, checkpoints, validation, tracer)
        except RunFailed:  # raised on every rank
            checkpoints.finish()  # the run may be resumed from the checkpoint that is being written
            raise
        trainer.finish()
        if tracer is not None:
            tracer.finish()
        if stopped:
            reason = stop.agreed_reason(world)
            if log is not None:
                reason = f"{STOPPED}{reason}, after iteration {trainer.iteration}"
                log.print_line(f"{reason}; to be resumed from {directory.last_checkpoint()}")
                log.print_line(f"resume it: {resume_command(directory.path, config, starts_ranks(config))}")
                directory.write_result(run_result(directory, config, INTERRUPTED, reason, started), replace=False)
            return EXIT_RESUME
        if log is not None:
            directory.write_result(run_result(directory, config, OK, "", started), replace=False)
            for line in closing_lines(directory, is_exportable=not config.model.is_grid_classifier):
                log.print_line(line)
        if config.training.profile_operators is not None:
            world.barrier()  # a rank that fails in it ends all ranks, so the run's result must be written first
            _profile_operators(trainer, config.training.profile_operators, directory, log)
        return EXIT_OK
    except BaseException as error:
        if isinstance(error, UsageError) and directory is None:
            raise  # every rank raises it, and none waits
        end_failed_run(directory, world, started, error, has_supervisor=on_directory_created is not None)
        return EXIT_RUN_FAILED
    finally:
        watchers.close()


def _check_ranks(config: RunConfig, world: Communicator) -> None:
    """Raise a ``UsageError`` if MPI has joined another number of ranks than the layout has."""
    layout, ranks, launched = config.layout, config.layout.ranks, launched_rank()
    is_alone = world.size == 1 and launched is not None and launched.ranks not in (None, 1)
    if world.size == ranks and not is_alone:
        return
    message = f"layout.dp {layout.dp} * layout.tp {layout.tp} * layout.pp {layout.pp} = {ranks} ranks, "
    if world.size != 1:
        message += f"but MPI has joined {world.size}; start {ranks}, or set layout.dp, tp and pp to make {world.size}"
    elif launched is None:
        message += f"but this is one process; add --ranks {ranks}, or use `mpirun -n {ranks}`"
    else:
        message += (
            f"but MPI has joined 1, this process alone: start {ranks}, with the mpirun of the MPI that mpi4py was "
            "built for (`fugaku-gpt doctor` shows both)"
        )
    raise UsageError(message)


def _require_room_for_checkpoint(config: RunConfig, out: Path) -> None:
    """Refuse a run whose last checkpoint does not fit on the disk: that would show at its end.

    Raises:
        UsageError: it does not fit.
    """
    elements = sum(math.prod(shape) for shape in logical_shapes(config.model).values())
    needed = elements * len(KINDS) * (8 if config.training.dtype == "float64" else 4)
    try:
        require_room(RunDirectory(out).checkpoints_dir, needed)
    except RunFailed as error:
        raise UsageError(f"{error}; or set checkpoint.at_end=false and no checkpoint.interval") from None


def _find_checkpoint(
    config: RunConfig,
    out: Path,
    world: Communicator,
    resume: str,
    has_fingerprint: Callable[[str], bool],
    force_data: bool,
) -> ResumePlan:
    """Return the checkpoints from which to resume, as rank 0 finds them; collective."""
    plan = collective_try(
        world, lambda: find_checkpoint(config, out, resume, has_fingerprint, force_data) if world.rank == 0 else None
    )
    return broadcast_plan(plan, world)


def _create_directory(config: RunConfig, out: Path, world: Communicator, resume: bool) -> RunDirectory:
    """Return the run directory, which rank 0 creates; collective."""
    directory = RunDirectory(out)
    holder = os.environ.get(HOLDER_VARIABLE)  # the process that started the ranks may have claimed it for them

    def create() -> None:
        if world.rank == 0:
            directory.create(dump_run_config(config), holder, resume=resume)
            directory.remove_flight_records()

    collective_try(world, create)
    return directory


def _metrics_writer(config: RunConfig, directory: RunDirectory) -> MetricsWriter:
    """Return what writes the metrics of the run, with event files if it asks for them; for rank 0."""
    if not config.training.tensorboard:
        return MetricsWriter(directory.metrics_file)
    from fugaku_gpt.records.tensorboard import MetricsAndEventsWriter  # here: most runs do without

    return MetricsAndEventsWriter(directory.metrics_file, directory.events_dir)


def _resume(
    trainer: Trainer, plan: ResumePlan, log: Optional[TrainingLog], build: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Resume as planned, and log it; returns the saved scalars."""
    before = time.perf_counter()
    path, manifest, rejected = resume_from(trainer, plan)
    if log is not None:
        for line in (*plan.messages, *rejected):
            log.print_line(line)
        differences = build_differences(manifest.build, build)
        if differences:
            log.print_line(f"another build than the checkpoint's, equal to rounding only: {', '.join(differences)}")
        log.resumed(manifest.iteration, path.name, trainer.consumed_tokens)
        log.print_line(
            f"resuming from {path.name}: iteration {manifest.iteration}, {manifest.consumed_samples} samples consumed; "
            f"loaded in {time.perf_counter() - before:.3f} s"
        )
    return manifest.state


def _profile_operators(trainer: Trainer, iterations: int, directory: RunDirectory, log: Optional[TrainingLog]) -> None:
    """Write an iteration's time by class of operators to the run directory.

    The run itself has ended well and its result is recorded, so a failure is only logged. A rank that fails alone ends
    all ranks; their launcher then keeps the recorded result
    (:func:`fugaku_gpt.launch.launch_result.result_of_launch`).
    """
    operators, reason = None, "the run is to stop, or a rank's PyTorch has no profiler that sees its operators"
    try:
        operators = profile_operators(trainer, iterations)
        trainer.finish()
    except RunFailed as error:  # raised on every rank
        reason = str(error)
        trainer.finish()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        world = trainer.grid.world
        if world.size > 1:  # other ranks may be waiting for this one
            message = (
                f"fugaku-gpt: rank {world.rank}: operators were not profiled: {reason}; the run itself has ended well"
            )
            print(harmless(message), file=sys.stderr, flush=True)
            world.abort(EXIT_RUN_FAILED)
    if log is None:
        return
    if operators is None:
        log.print_line(f"operators were not profiled: {reason}")
        return
    try:
        write_operators(directory.path, operators)
    except OSError as error:
        log.print_line(f"operators were profiled, but cannot be written to {directory.path}: {error.strerror}")
    shares = sorted(((seconds / operators.seconds_per_iteration, name) for name, seconds in operators.classes.items()))
    log.print_line(
        f"operators of {iterations} more iterations, {operators.slowdown:.2f} times as long by being profiled: "
        + ", ".join(f"{name} {share:.1%}" for share, name in reversed(shares) if share >= 0.0005)
    )


def run_loop(
    trainer: Trainer,
    log: Optional[TrainingLog] = None,
    checkpoints: Optional[CheckpointSaver] = None,
    validation: Optional[Validation] = None,
    tracer: Optional[StepTracer] = None,
) -> bool:
    """Run the remaining iterations. Every rank makes the same calls: what is logged is summed here, not where it is
    printed.

    Args:
        validation: what measures losses; default: that of the validation split alone, if the run validates.
        tracer: what traces iterations; default: none is traced.

    Returns:
        True if the run was stopped before its end because some rank wanted it.

    Raises:
        RunFailed: the run fails, or its last checkpoint could not be written; raised on every rank.
    """
    training, checkpointing = trainer.config.training, trainer.config.checkpoint
    validation = validation or Validation(trainer, log)
    if validation.is_due_at_start():
        validation.run()
    trainer.grid.world.barrier()
    meter = Meter(trainer)
    steps: List[Step] = []  # since the last line
    has_reported_copy = False
    tracer_due = tracer.due if tracer is not None else NEVER
    while trainer.iteration < training.iterations:
        if trainer.iteration == tracer_due and tracer is not None:
            meter.since += tracer.advance()
            tracer_due = tracer.due
        step = trainer.step()
        steps.append(step)
        iteration = trainer.iteration
        if log is not None and step.skip_reason:
            log.skipped_step(iteration, step)
        if log is not None and trainer.copy_bytes and not has_reported_copy:
            has_reported_copy = True
            log.print_line(
                f"a copy of weights and optimiser state for loss spikes, every {training.rollback_every} iterations, "
                f"takes {trainer.copy_bytes / 2**20:.1f} MiB of rank 0"
            )
        is_last = iteration == training.iterations
        if iteration % training.log_interval == 0 or is_last:
            measured = meter.read(len(steps))  # waits for the slowest rank, whose time is that of the iteration
            if log is not None:
                consumed = trainer.consumed_samples, trainer.consumed_tokens
                log.iteration(iteration, steps, consumed, trainer.health.skipped_steps, measured)
            steps = []
        # an iteration's time excludes validation and waiting for checkpoints
        before = time.perf_counter()
        is_due = validation.is_due(iteration)
        if is_due and not step.stop:  # there may be time for a checkpoint alone
            validation.run()
            trainer.grid.world.barrier()
        if checkpoints is not None:
            checkpoints.advance(step)
            must_succeed = checkpointing.at_end if is_last else step.stop
            if must_succeed or checkpoints.is_due(iteration):
                checkpoints.save(validation.state(), wait=must_succeed)
        if is_due and step.stop and is_last:  # no later run measures them
            validation.run()
            trainer.grid.world.barrier()
        elif is_due and step.stop and log is not None:
            log.print_line(f"to stop soon, the run measures no losses after iteration {iteration}")
        if step.stop and not is_last:
            return True
        meter.since += time.perf_counter() - before
    if checkpoints is not None:
        checkpoints.finish()
        if checkpoints.failure is not None:  # a run that has not kept its last checkpoint has not ended well
            raise RunFailed(checkpoints.failure)
    return False
