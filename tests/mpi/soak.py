"""Trains random layouts with random delays before MPI calls on random ranks: does any hang, or draw another curve?

    mpirun -n 8 python -m tests.mpi.soak --layouts 20 --seed 1
    mpirun -n 8 python -m tests.mpi.soak --replay layout.dp=8 training.dtype=float64 ...

Each layout makes its own communicators, model and optimiser, trains three iterations and validates. Losses, norms, the
outcome of each step, and the loss of validation are compared with those of one rank; a layout is printed before it
starts. A watchdog on each rank ends the job, with the Python stacks, when one layout takes longer than ``--limit``.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import shlex
import sys
import time
import traceback
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import Any, Dict, List, Optional, Tuple

import torch

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.comm.pending import OUTSTANDING
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.training.health import DONE, SPIKE
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.layouts import Drawn, draw_layouts, from_arguments
from tests.support.text import ByteSamples

ITERATIONS = 3
SPOILT_ITERATION = 2
LONGEST_DELAY_SECONDS = 0.01
# of losses and of norms, relative, from one rank's in the same precision
TOLERANCE = {"float64": (1e-12, 1e-11), "float32": (1e-5, 1e-4), "bfloat16": (1e-3, 1e-2), "float16": (1e-3, 1e-2)}
TOLERANCE_OF_ROUNDED_SUMS = (1e-3, 1e-2)  # where gradients are summed in bfloat16


class Delayed(Communicator):
    """A communicator that now and then sleeps before a call, as a rank does that the system has preempted."""

    dice = random.Random()
    split_handles: List[Any] = []  # MPI handles of the communicators that were split off

    def split(self, color: Optional[int], key: int, name: str) -> "Communicator":
        part = super().split(color, key, name)
        if part._handle is not None:
            self.split_handles.append(part._handle)
        return Delayed(part._handle, name, shares_cores=True)

    def _enter(
        self, operation: str, tensor: Optional[torch.Tensor], blocking: bool = True, peer: Optional[int] = None
    ) -> int:
        if self.dice.random() < 0.2:
            time.sleep(self.dice.random() * LONGEST_DELAY_SECONDS)
        return super()._enter(operation, tensor, blocking, peer)


@dataclass
class Curve:
    """Losses, norms and outcomes of the steps of a run.

    Attributes:
        losses: of each step, and the last one of validation.
        norms: of the gradient of each step.
        outcomes: of each step: why it was skipped, and the size of its batch.
    """

    losses: List[float] = field(default_factory=list)
    norms: List[float] = field(default_factory=list)
    outcomes: List[Tuple[str, int, int]] = field(default_factory=list)


def curve_of(drawn: Drawn, grid: ProcessGrid) -> Curve:
    """Trains a short run. Collective over the grid."""
    config = drawn.config
    earlier = list(OUTSTANDING)  # of tests before this one, where it is run among others
    samples = ByteSamples(config.model.seq_len)
    trainer = Trainer(config, grid, samples, samples)
    finish = trainer.reducer.finish

    def finish_with_nan() -> None:
        finish()
        trainer.buffers.gradients.fill_(math.nan)

    curve = Curve()
    for iteration in range(1, ITERATIONS + 1):
        is_spoilt = iteration == SPOILT_ITERATION and grid.world.rank == drawn.spoilt_rank
        trainer.reducer.finish = finish_with_nan if is_spoilt else finish  # type: ignore[method-assign]
        step = trainer.step()
        curve.losses.append(step.loss)
        curve.norms.append(step.grad_norm)
        curve.outcomes.append((step.skip_reason, step.samples, step.seq_len))
    curve.losses.append(trainer.validate())
    trainer.finish()
    unawaited = [message for message in OUTSTANDING if not any(message is other for other in earlier)]
    assert not unawaited, "messages that nobody waits for"
    return curve


@lru_cache(maxsize=None)
def reference_of(drawn: Drawn) -> Curve:
    """Returns the curve of one rank."""
    return curve_of(drawn, ProcessGrid.alone())


def distance(drawn: Drawn, curve: Curve) -> Tuple[float, float]:
    """Returns the largest relative distances of a loss and of a norm from those of one rank.

    Raises:
        AssertionError: a distance is too large, or the outcome of a step differs.
    """
    reference, training = reference_of(drawn.reference), drawn.config.training
    assert curve.outcomes == reference.outcomes, f"steps became {curve.outcomes}, one rank's {reference.outcomes}"
    # norms of skipped steps are not compared
    done = [skip_reason in (DONE, SPIKE) for skip_reason, _, _ in reference.outcomes]
    distances = (
        max(abs(ours / theirs - 1) for ours, theirs in zip(curve.losses, reference.losses)),
        max([0.0] + [abs(ours / theirs - 1) for ours, theirs in compress(zip(curve.norms, reference.norms), done)]),
    )
    bounds = TOLERANCE[training.dtype]
    if training.gradient_dtype == "bfloat16":
        bounds = TOLERANCE_OF_ROUNDED_SUMS
    assert all(value <= bound for value, bound in zip(distances, bounds)), (
        f"{distances} from one rank: {curve}, {reference}"
    )
    return distances


def run(world: Delayed, drawn: Drawn) -> Tuple[float, float]:
    """Trains a layout on all ranks; returns its distance from one rank on rank 0, zeros elsewhere. Collective.

    Raises:
        AssertionError: see :func:`distance`; or ranks have seen different losses.
    """
    config, layout = drawn.config, drawn.config.layout
    coordinates = coordinates_of(world.rank, layout, layout.order)
    node = coordinates.dp // drawn.node_replicas if drawn.node_replicas is not None else None
    grid = ProcessGrid(world, layout, node, config.kv_copies)
    curve = curve_of(drawn, grid)
    losses_of_ranks = world.all_gather(torch.tensor(curve.losses, dtype=torch.float64))
    assert bool((losses_of_ranks == losses_of_ranks[0]).all()), (
        f"ranks have seen different losses: {losses_of_ranks.tolist()}"
    )
    while Delayed.split_handles:
        Delayed.split_handles.pop().Free()
    return distance(drawn, curve) if world.rank == 0 else (0.0, 0.0)  # the other ranks continue with the next layout


def run_layouts(world: Delayed, drawn: List[Drawn], limit: float) -> None:
    """Trains these layouts, one after the other, and prints how far their curves are from one rank's. Collective.

    Args:
        limit: seconds that a layout may take; past them, the process prints its stacks and exits.

    Raises:
        AssertionError: see :func:`run`; standard error says how to run that layout alone.
    """
    worst: Dict[str, Tuple[float, float]] = {}
    try:
        for number, layout in enumerate(drawn, start=1):
            arguments = " ".join(layout.arguments)
            if world.rank == 0:
                print(f"layout {number}/{len(drawn)} on {world.size} ranks: {arguments}", flush=True)
            faulthandler.dump_traceback_later(limit, exit=True)
            try:
                dtype, measured = layout.config.training.dtype, run(world, layout)
            except BaseException:
                replay_arguments = " ".join(map(shlex.quote, layout.arguments))
                print(
                    f"rank {world.rank}: {traceback.format_exc()}failed on {world.size} ranks: {arguments}\n"
                    f"alone: python -m tests.mpi.start {world.size} -m tests.mpi.soak --replay {replay_arguments}",
                    file=sys.stderr,
                    flush=True,
                )
                raise
            before = worst.get(dtype, (0.0, 0.0))
            worst[dtype] = (max(measured[0], before[0]), max(measured[1], before[1]))
        faulthandler.dump_traceback_later(limit, exit=True)
        world.barrier()
    finally:
        faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        distances = ", ".join(f"{dtype} loss {loss:.1e} norm {norm:.1e}" for dtype, (loss, norm) in worst.items())
        print(f"largest distance from one rank: {distances}")
        print(f"{len(drawn)} random layouts on {world.size} ranks: none hung, every curve is one rank's")


def layouts_of(world: Communicator, count: int, seed: int) -> List[Drawn]:
    """Returns ``count`` random layouts of all ranks, which rank 0 draws. Collective."""
    drawn = [layout.arguments for layout in draw_layouts(world.size, count, seed)] if not world.rank else []
    return [from_arguments(arguments) for arguments in world.broadcast_json(drawn)]


def delayed(world: Communicator) -> Delayed:
    """Returns a communicator of the same ranks, which now and then sleep before a call, each at other times."""
    Delayed.dice.seed(world.rank + os.getpid())
    return Delayed(world._handle, "world", shares_cores=True)


def main() -> None:
    """Trains the layouts and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, help="Seconds that one layout may take.")
    parser.add_argument("--replay", nargs="+", metavar="KEY=VALUE", help="Train only this layout.")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    torch.set_num_threads(1)
    plain = open_world()
    drawn = [from_arguments(options.replay)] if options.replay else layouts_of(plain, options.layouts, options.seed)
    try:
        run_layouts(delayed(plain), drawn, options.limit)
    except BaseException:
        plain.abort(1)
        raise


if __name__ == "__main__":
    main()
