"""Traces what every rank does when, in the iterations of ``training.trace_iterations``.

The flight recorder's records are kept in memory while these iterations run (``comm/trace.py``), and written to the run
directory afterwards (``records/trace.py``). Clocks are compared before and after.
"""

from __future__ import annotations

import shlex
import socket
import time
from pathlib import Path
from typing import Callable, List, Optional, Tuple

from fugaku_gpt.comm.clocks import NodeClocks
from fugaku_gpt.comm.trace import TraceBuffer
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.layout.trace_room import trace_room
from fugaku_gpt.records.flight import LOG
from fugaku_gpt.records.trace import CALL_INT64S, PHASE_INT64S, ClockReading, TraceHead, remove_traces, write_trace
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.trainer import Trainer

NEVER = -1  # no iteration


class StepTracer:
    """Traces the iterations of ``training.trace_iterations`` that a run has still to do.

    Attributes:
        due: number of done iterations at which :meth:`advance` is to be called; ``NEVER`` once the trace is written.
    """

    def __init__(
        self, trainer: Trainer, directory: Path, log: Optional[TrainingLog], batches_of_files: int = 0
    ) -> None:
        """``directory``: where the traces are written. ``log``: the run's log, on rank 0 only. ``batches_of_files``:
        of windows of ``training.eval_files``, over all replicas."""
        self._trainer = trainer
        self._batches_of_files = batches_of_files
        self._directory = directory
        self._log = log
        self._buffer: Optional[TraceBuffer] = None
        self._clocks: Optional[NodeClocks] = None
        self._readings: List[ClockReading] = []
        self._done_before = trainer.iteration  # iterations that were done when the trace began
        self._first, self._last = trainer.config.training.traced or (NEVER, NEVER)
        self.due = max(self._first - 1, trainer.iteration) if trainer.iteration < self._last else NEVER

    def advance(self) -> float:
        """Begin the trace, or end it and write it; collective. Returns the seconds that this took."""
        before = time.perf_counter()
        if self._buffer is None:
            self._start()
            self.due = self._last
        else:
            self.finish()
        return time.perf_counter() - before

    def finish(self) -> None:
        """End the trace and write it, if it has begun; collective. A trace that cannot be written is no failure of the
        run: the log says why."""
        buffer, world = self._buffer, self._trainer.grid.world
        self.due = NEVER
        if buffer is None:
            return
        self._buffer = None
        buffer.stop()
        world.mark_phase(LOG, micro_batch=-1)  # what follows is no part of the iteration
        self._read_clock()
        first_problem = self._first_problem(lambda: remove_traces(self._directory) if world.rank == 0 else None)
        if first_problem is None:
            first_problem = self._first_problem(lambda: self._write(buffer))
        if self._log is None:
            return
        first, last = self._traced()
        which = f"iterations {first}-{last}" if last > first else f"iteration {first}"
        if first_problem is not None:
            self._log.print_line(f"the trace of {which} could not be written: {first_problem}")
        else:
            run = shlex.quote(str(self._directory.parent))
            self._log.print_line(f"{which} traced: fugaku-gpt report trace {run}")

    def close(self) -> None:
        """End a trace that has begun, without writing it: the run ends within it."""
        if self._buffer is not None:
            self._buffer.stop()

    def _start(self) -> None:
        trainer = self._trainer
        world, recorder = trainer.grid.world, trainer.grid.world.recorder
        if recorder is None:
            raise RunFailed("training.trace_iterations: the trainer's ranks have no flight recorder")
        world.mark_phase(LOG, micro_batch=-1)
        iterations = self._last - trainer.iteration
        stage = trainer.grid.coordinates.pp
        calls, phases = trace_room(trainer.config, stage, iterations, self._batches_of_files)
        buffer = TraceBuffer(recorder, calls, phases)
        self._read_clock()
        world.barrier()
        self._buffer, self._done_before = buffer, trainer.iteration
        buffer.start()

    def _traced(self) -> Tuple[int, int]:
        """The first and the last iteration of the trace: fewer than were asked for where the run was resumed or has
        stopped within them."""
        first = self._done_before + 1
        return first, max(first, min(self._last, self._trainer.iteration))

    def _read_clock(self) -> None:
        if self._clocks is None:
            self._clocks = NodeClocks(self._trainer.grid.world)
        offset, error = self._clocks.compare()
        self._readings.append(ClockReading(time.time(), offset, error))

    def _write(self, buffer: TraceBuffer) -> None:
        grid = self._trainer.grid
        world, recorder = grid.world, grid.world.recorder
        assert recorder is not None
        phases, calls = buffer.phases, buffer.calls
        first, last = self._traced()
        head = TraceHead(
            rank=world.rank,
            ranks=world.size,
            dp=grid.coordinates.dp,
            pp=grid.coordinates.pp,
            tp=grid.coordinates.tp,
            host=socket.gethostname(),
            first=first,
            last=last,
            started=buffer.started,
            ended=buffer.ended,
            is_cut=buffer.is_cut,
            clock=tuple(self._readings),
            names=tuple(recorder.names),
            communicators=tuple(recorder.communicators),
            phases=len(phases) // (8 * PHASE_INT64S),
            calls=len(calls) // (8 * CALL_INT64S),
        )
        write_trace(self._directory, head, phases, calls)

    def _first_problem(self, action: Callable[[], None]) -> Optional[str]:
        """Do something on every rank; returns the first rank's reason why it could not, the same on all; collective."""
        world, problem = self._trainer.grid.world, None
        try:
            action()
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
        problems = world.gather_json(problem)
        first = None
        if problems is not None:
            first = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)
        agreed: Optional[str] = world.broadcast_json(first)
        return agreed
