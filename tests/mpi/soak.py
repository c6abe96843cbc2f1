"""Many short DP=2 x TP=2 runs with random delays before MPI calls, on random ranks: does any of them hang?

    mpirun -n 4 python -m tests.mpi.soak --runs 20

Each run makes its own communicators, model and optimiser and trains three iterations; rank 0 checks the losses against
the first run's. A watchdog on each rank ends the job, with the Python stacks, when one run takes longer than
``--limit``.
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
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

ITERATIONS = 3
LONGEST_DELAY_SECONDS = 0.01


class Delayed(Communicator):
    """A communicator that now and then sleeps before a call, as a rank does that the system has put aside."""

    dice = random.Random()

    def split(self, color: int, key: int, name: str) -> "Communicator":
        part = super().split(color, key, name)
        return Delayed(part._handle, name, shares_cores=True)

    def _enter(self, operation: str, tensor: Optional[torch.Tensor]) -> int:
        if self.dice.random() < 0.2:
            time.sleep(self.dice.random() * LONGEST_DELAY_SECONDS)
        return super()._enter(operation, tensor)


def one_run(world: Communicator) -> List[float]:
    """Losses of a short run."""
    config = tiny_config("layout.dp=2", "layout.tp=2", "training.dtype=float64")
    grid = ProcessGrid(world, LayoutConfig(dp=2, tp=2))
    trainer = Trainer(config, grid, ByteSamples(config.model.seq_len))
    return [trainer.step().loss for _ in range(ITERATIONS)]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that one run may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = open_world()
    Delayed.dice.seed(plain.rank + os.getpid())
    world = Delayed(plain._handle, "world", shares_cores=True)
    first: List[float] = []
    for run in range(options.runs):
        faulthandler.dump_traceback_later(options.limit, exit=True)
        losses = one_run(world)
        first = first or losses
        if losses != first:
            raise SystemExit(f"run {run}: losses {losses} differ from the first run's {first}")
        if world.rank == 0:
            print(f"run {run + 1}/{options.runs}: loss {losses[-1]:.6f}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        print(f"{options.runs} runs of DP=2 x TP=2: none hung, all losses equal")


if __name__ == "__main__":
    main()
