"""Random layouts with random delays before MPI calls, on random ranks: does any of them hang, or draw another curve?

    mpirun -n 8 python -m tests.mpi.soak --layouts 20 --seed 1

Each layout makes its own communicators, model and optimiser and trains three iterations; float64 losses are compared
with those of one rank. A watchdog on each rank ends the job, with the Python stacks, when one layout takes longer than
``--limit``; the layout is printed before it starts.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import time
from typing import List, Optional

import torch

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config.schema import GRID_ORDERS, PIPELINE_SCHEDULES
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

ITERATIONS = 3
LAYERS = 8
GLOBAL_BATCH = 24  # divides by 1, 2, 3, 4, 6 and 8 replicas
LONGEST_DELAY_SECONDS = 0.01
RUN = (f"model.layers={LAYERS}", f"training.global_batch={GLOBAL_BATCH}", "training.dtype=float64")
TOLERANCE = 1e-11  # of float64 losses, relative


class Delayed(Communicator):
    """A communicator that now and then sleeps before a call, as a rank does that the system has put aside."""

    dice = random.Random()

    def split(self, color: Optional[int], key: int, name: str) -> "Communicator":
        part = super().split(color, key, name)
        return Delayed(part._handle, name, shares_cores=True)

    def _enter(
        self, operation: str, tensor: Optional[torch.Tensor], waits: bool = True, peer: Optional[int] = None
    ) -> int:
        if self.dice.random() < 0.2:
            time.sleep(self.dice.random() * LONGEST_DELAY_SECONDS)
        return super()._enter(operation, tensor, waits, peer)


def random_layout(dice: random.Random, ranks: int) -> List[str]:
    """Settings of a valid run on so many ranks, drawn over every feature."""
    tp = dice.choice([size for size in (1, 2, 4) if ranks % size == 0])
    pp = dice.choice([size for size in (1, 2, 4, 8) if ranks // tp % size == 0])
    schedule = dice.choice(PIPELINE_SCHEDULES)
    chunks = dice.randint(1, LAYERS // pp) if schedule == "interleaved" else 1
    dp = ranks // tp // pp
    settings = {
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.order": dice.choice(GRID_ORDERS),
        "layout.schedule": schedule,
        "layout.chunks": chunks,
        "layout.zero": dice.randint(0, 1),
        "layout.sequence_parallel": dice.random() < 0.5,
        "training.recompute": dice.choice(["none", "selective", "full"]),
        "training.micro_batch": dice.choice([size for size in (1, 2) if GLOBAL_BATCH % (size * dp) == 0]),
        "training.bucket_mib": dice.choice([0.005, 0.02, 1]),
        "training.dtype": dice.choice(["float64", "float64", "float64", "bfloat16"]),
    }
    return [f"{key}={value}" for key, value in settings.items()]


def losses_of(grid: ProcessGrid, *settings: str) -> List[float]:
    """Losses of a short run."""
    config = tiny_config(*RUN, *settings)
    trainer = Trainer(config, grid, ByteSamples(config.model.seq_len))
    losses = [trainer.step().loss for _ in range(ITERATIONS)]
    assert float(trainer.buffers.parameters.abs().sum()) > 0  # waits for what is still on its way
    return losses


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one layout may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = open_world()
    Delayed.dice.seed(plain.rank + os.getpid())
    world = Delayed(plain._handle, "world", shares_cores=True)
    dice = random.Random(options.seed)  # the same on every rank
    judge = losses_of(ProcessGrid.alone())
    for number in range(options.layouts):
        settings = random_layout(dice, world.size)
        if world.rank == 0:
            print(f"layout {number + 1}/{options.layouts} on {world.size} ranks: {' '.join(settings)}", flush=True)
        faulthandler.dump_traceback_later(options.limit, exit=True)
        layout = tiny_config(*RUN, *settings).layout
        losses = losses_of(ProcessGrid(world, layout), *settings)
        faulthandler.cancel_dump_traceback_later()
        if "training.dtype=float64" in settings:
            worst = max(abs(loss / judged - 1) for loss, judged in zip(losses, judge))
            if worst > TOLERANCE:
                raise SystemExit(f"losses {losses} differ from one rank's {judge} in {' '.join(settings)}")
        world.barrier()
    if world.rank == 0:
        print(f"{options.layouts} random layouts on {world.size} ranks: none hung, every curve is one rank's")


if __name__ == "__main__":
    main()
