"""``python -m tests.mpi.start 4 -m tests.mpi.leave_early [flat | node-first]``: trains for a few steps and leaves at
once, with parameters of other replicas still on their way."""

from __future__ import annotations

import sys

import torch

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 4  # in the second and third nothing stays in flight


def train_and_leave(world: Communicator, by_nodes: bool) -> None:
    """Trains, and returns with parameters in flight; the process must end next. Rank 0 says so on standard error."""
    config = tiny_config(f"layout.dp={world.size}", "layout.zero=1", f"layout.hierarchical_sum={by_nodes}")
    grid = ProcessGrid(world, config.layout, world.rank // 2)
    trainer = Trainer(config, grid, ByteSamples(config.model.seq_len))
    for _ in range(STEPS):
        trainer.step()
    if world.rank == 0:
        pending = trainer._gather is not None and len(trainer._gather._pending)
        text = f"{world.size} ranks leave; node first: {grid.sum_facts['node_first']}; on their way: {pending} buckets"
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Trains and leaves."""
    torch.set_num_threads(1)
    train_and_leave(open_world(), sys.argv[1:] == ["node-first"])


if __name__ == "__main__":
    main()
