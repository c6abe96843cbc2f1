"""Sums over replicas on real ranks: shares without parameters."""

from __future__ import annotations

import pytest

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 4


def trainer_of(world: Communicator, *settings: str, alone: bool = False) -> Trainer:
    """A tiny run on nodes of two ranks, or the same run on this rank alone."""
    config = tiny_config(*settings)
    grid = ProcessGrid.alone() if alone else ProcessGrid(world, config.layout, world.rank // 2)
    return Trainer(config, grid, ByteSamples(config.model.seq_len))


def test_a_replica_whose_share_is_padding_alone_trains_along(world: Communicator) -> None:
    if world.size != 8:
        pytest.skip("eight replicas")
    smallest = ("model.layers=1", "model.hidden=2", "model.heads=1", "training.bucket_mib=1")
    spikes = ("training.rollback_every=2", "training.spike_ratio=100")  # a copy of nothing is kept as well
    ours = trainer_of(world, *smallest, *spikes, "layout.dp=8", "layout.zero=1")
    judge = trainer_of(world, *smallest, alone=True)
    assert (not ours._runs) == (world.rank == 7)
    for _ in range(STEPS):
        assert ours.step().loss == pytest.approx(judge.step().loss, rel=1e-5)
    ours.finish()
