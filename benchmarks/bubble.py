"""Measures a pipeline's idle time beside the schedule's prediction: (p - 1) / m, divided by v for the interleaved
schedule, and a third of that if the gradients of weights are deferred.

    .venv/bin/python benchmarks/bubble.py                    # 4 stages, 8 micro-batches, each kind of schedule
    .venv/bin/python benchmarks/bubble.py --stages 2 --micro-batches 4 16

The ranks, the messages and the trainer's pipeline are real; only the layers are replaced by sleeps, so that ranks that
share a core do not disturb each other. A stage's forward pass takes ``--pass-ms``, and its backward pass takes twice as
long, half of it for the gradients of weights; both are divided among v chunks. The figures are idle time over busy
time, averaged over the stages, in the best of ``--tries`` steps: a busy machine only adds to them.

Ranks that share a core, as these do, look for messages once a millisecond, so that the rank with work gets the core;
with a core of its own, a rank would spin and see a message immediately. The column ``delayed`` is the prediction if
every message is seen a millisecond late: with more chunks, passes are shorter and more messages follow each other. If
other work competes for the cores, ranks also wake up late. The time that this adds to a step does not grow with the
passes: with 4 chunks on two busy cores it is 0.15 s both with ``--pass-ms 200`` (in a bubble of 0.45 s) and with 800
(in a bubble of 1.8 s). So it belongs to the benchmark and not to the schedule, and longer passes make it small.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.layout.schedule_times import Timing, simulate
from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.parallel.pipeline import Pipeline

SHAPE = (2, 8)  # of the hidden states: messages cost next to nothing
MESSAGE_DELAY_SECONDS = 1e-3  # the longest pause of a rank that shares its core and waits
WARM_UP_SECONDS = 1e-3  # the first message between two ranks opens a connection


class Clock(Protocol):
    """The clock that measures a step: the module ``time``, or a stand-in of a test."""

    def perf_counter(self) -> float:
        """Return seconds since any fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Let that time pass."""


@dataclass
class Sleeper:
    """Seconds of one pass through one chunk, and the total seconds slept; ``backward`` excludes the gradients of
    weights."""

    forward: float
    backward: float
    weights: float
    clock: Clock
    busy: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleeps instead of computing."""
        before = self.clock.perf_counter()
        self.clock.sleep(seconds)
        self.busy += self.clock.perf_counter() - before


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeper: Sleeper) -> torch.Tensor:
        ctx.sleeper = sleeper
        sleeper.sleep(sleeper.forward)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:
        ctx.sleeper.sleep(ctx.sleeper.backward)
        return gradient.clone(), None


class SleepingReducer:
    """Stands in for the trainer's reducer: it sleeps for the gradients of weights, deferred or not."""

    def __init__(self, sleepers: Mapping[int, Sleeper]) -> None:
        self._sleepers = sleepers
        self._at_once: Optional[Sleeper] = None

    def begin_backward(self, micro_batch: int, chunk: int, is_last: bool, is_deferring: bool = False) -> None:
        """Begins a backward pass."""
        self._at_once = None if is_deferring else self._sleepers[chunk]

    def end_backward(self) -> None:
        """Ends a backward pass, with the gradients of weights if they are not deferred."""
        if self._at_once is not None:
            self._at_once.sleep(self._at_once.weights)

    def make_deferred(self, micro_batch: int, chunk: int) -> None:
        """Computes deferred gradients of weights."""
        self._sleepers[chunk].sleep(self._sleepers[chunk].weights)


def predicted_bubble(
    kind: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    pass_seconds: float,
    work: Optional[Sequence[float]] = None,
    delay: float = 0.0,
) -> float:
    """The value that :func:`measured_bubble` should return for the same arguments.

    Args:
        delay: seconds from the moment both ends of a message are ready until it is seen.
    """
    forward = [pass_seconds / chunks * share for share in (work or [1.0] * stages * chunks)]
    timing = Timing(forward, [2.0 * seconds for seconds in forward], delay, weights=forward)
    return simulate([schedule(kind, rank, stages, micro_batches, chunks) for rank in range(stages)], timing).mean_bubble


def measured_bubble(
    pp: Communicator,
    kind: str,
    micro_batches: int,
    chunks: int,
    pass_seconds: float,
    work: Optional[Sequence[float]] = None,
    clock: Clock = time,
) -> float:
    """Idle over busy time of one step, averaged over the stages of ``pp``; the same on each. Collective.

    Args:
        pass_seconds: seconds of a forward pass through all chunks of a stage.
        work: work of each chunk of the model, as a multiple of the usual work; default: 1 for all.
        clock: the clock that all ranks share.
    """
    last = pp.size * chunks - 1
    sleepers: Dict[int, Sleeper] = {}
    for chunk in range(pp.rank, last + 1, pp.size):
        seconds = pass_seconds / chunks * (work[chunk] if work is not None else 1.0)
        sleepers[chunk] = Sleeper(seconds, seconds, seconds, clock)
    actions = schedule(kind, pp.rank, pp.size, micro_batches, chunks)
    pipeline = Pipeline(actions, pp, last, SHAPE, torch.float32)
    first_input = torch.zeros(SHAPE, requires_grad=True)

    def forward(micro_batch: int, chunk: int, x: Optional[torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = _Slept.apply(first_input if x is None else x, sleepers[chunk])
        return y.sum() if chunk == last else y

    pp.barrier()
    # one clock for all: perf_counter is the machine's monotonic clock, and the ranks are on one machine
    ends = torch.tensor([-clock.perf_counter(), 0.0], dtype=torch.float64)
    pipeline.run(forward, SleepingReducer(sleepers))
    ends[1] = clock.perf_counter()
    pp.all_reduce(ends, "max")
    busy = sum(sleeper.busy for sleeper in sleepers.values())
    share = torch.tensor([float(ends.sum()) / busy - 1.0], dtype=torch.float64)
    pp.all_reduce(share)
    return float(share) / pp.size


def _print_rows(world: Communicator, options: argparse.Namespace) -> None:
    kinds = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), *(("interleaved", chunks) for chunks in options.chunks)]
    for micro_batches in options.micro_batches:
        for kind, chunks in kinds:
            measured_bubble(world, kind, micro_batches, chunks, WARM_UP_SECONDS)
            tries = [
                measured_bubble(world, kind, micro_batches, chunks, options.pass_ms / 1e3) for _ in range(options.tries)
            ]
            shape = (kind, world.size, micro_batches, chunks, options.pass_ms / 1e3)
            predicted, delayed = predicted_bubble(*shape), predicted_bubble(*shape, delay=MESSAGE_DELAY_SECONDS)
            if world.rank == 0:
                print(
                    f"{kind:12}{world.size:4}{micro_batches:5}{chunks:4}{min(tries):11.4f}{predicted:11.4f}{delayed:9.4f}"
                    f"{min(tries) / predicted:8.3f}   {', '.join(f'{bubble:.4f}' for bubble in tries)}",
                    flush=True,
                )


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2], help="Chunks per stage if interleaved.")
    parser.add_argument("--pass-ms", type=float, default=600.0, help="Milliseconds of a stage's forward pass.")
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.stages < 2:
        parser.error(f"--stages {options.stages}: valid: 2 or more")
    if launched_rank() is not None:
        from ranks import open_patient_world

        torch.set_num_threads(1)
        _print_rows(open_patient_world(), options)
        return
    from ranks import run_ranks

    columns = (
        f"{'schedule':12}{'p':>4}{'m':>5}{'v':>4}{'measured':>11}{'predicted':>11}{'delayed':>9}{'ratio':>8}   tries"
    )
    print(columns, flush=True)
    for line in run_ranks(options.stages, __file__, arguments if arguments is not None else sys.argv[1:]):
        print(line)


if __name__ == "__main__":
    main()
