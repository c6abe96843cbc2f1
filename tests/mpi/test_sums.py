"""Tests of sums over replicas on real ranks: node first and flat, the embedding at both ends of a pipeline, overlap."""

from __future__ import annotations

from typing import Callable, List

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.comm.hierarchical import HierarchicalComm
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 4


def trainer_of(grid: Callable[[LayoutConfig], ProcessGrid], *settings: str) -> Trainer:
    """Returns a trainer of a tiny run."""
    config = tiny_config(*settings)
    return Trainer(config, grid(config.layout), ByteSamples(config.model.seq_len))


def on_nodes_of(world: Communicator, ranks: int) -> Callable[[LayoutConfig], ProcessGrid]:
    """Returns a function from a layout to its grid over nodes of ``ranks`` ranks."""
    return lambda layout: ProcessGrid(world, layout, world.rank // ranks)


def test_a_replica_whose_share_is_padding_alone_trains_along(world: Communicator) -> None:
    if world.size != 8:
        pytest.skip("eight replicas")
    smallest = ("model.layers=1", "model.hidden=2", "model.heads=1", "training.bucket_mib=1")
    spikes = ("training.rollback_every=2", "training.spike_ratio=100")  # a copy of nothing is kept as well
    ours = trainer_of(on_nodes_of(world, 2), *smallest, *spikes, "layout.dp=8", "layout.zero=1")
    reference = trainer_of(lambda _: ProcessGrid.alone(), *smallest)
    assert (not ours._param_ranges) == (world.rank == 7)
    for _ in range(STEPS):
        assert ours.step().loss == pytest.approx(reference.step().loss, rel=1e-5)
    ours.finish()


# nodes of each rank of dp=4, pp=2 with the stages' ranks side by side, and why sums are flat there
NODES = {
    "two of each": ([0, 0, 0, 0, 1, 1, 1, 1], ""),
    "three ranks": ([0, 0, 0, 1, 1, 1, 2, 2], "nodes hold different numbers of replicas, from 1 to 2"),
    "crossed": ([0, 0, 0, 1, 1, 0, 1, 1], "replicas of different weights lie on nodes in different ways"),
}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("nodes", ["flat", *NODES])
def test_the_embedding_is_the_same_to_the_bit_at_both_ends_of_a_pipeline(
    world: Communicator, nodes: str, zero: int
) -> None:
    if world.size != 8:
        pytest.skip("four replicas of two stages")
    settings = ("layout.dp=4", "layout.pp=2", f"layout.zero={zero}", f"layout.hierarchical_sum={nodes != 'flat'}")
    large = ("model.vocab_size=4096", "model.hidden=64", "training.bucket_mib=0.25", "training.lr=1e-2")
    node, why_flat = NODES.get(nodes, ([0] * 8, ""))
    run = trainer_of(lambda layout: ProcessGrid(world, layout, node[world.rank]), *settings, *large)
    embedding = run.buffers.layout.embedding
    assert len(run.buffers.layout.tied(4)) >= 4 and run.grid.embedding.size == 2
    assert run.grid.why_flat == why_flat
    assert isinstance(run.grid.replicas, HierarchicalComm) == (nodes == "two of each")
    before = run.buffers.parameters[embedding].clone()
    for _ in range(STEPS):
        run.step()
    after = run.buffers.parameters[embedding]
    assert float((after != before).float().mean()) > 0.9  # all but the rows that pad the vocabulary
    first, last = run.grid.embedding.all_gather(after)
    assert torch.equal(first, last)
    everywhere = run.grid.dp.all_gather(after)
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def test_the_records_say_how_replicas_are_summed(world: Communicator) -> None:
    if world.size != 4:
        pytest.skip("four ranks")
    layout = LayoutConfig(dp=4, hierarchical_sum=True)
    assert on_nodes_of(world, 2)(layout).sum_facts == {
        "replicas": 4,
        "node_first": True,
        "nodes": 2,
        "why_flat": "",
    }
    reasons: List[str] = [grid.why_flat for grid in (on_nodes_of(world, 1)(layout), ProcessGrid(world, layout))]
    assert reasons == [
        "no node holds two replicas of the same weights",
        "all replicas of the same weights are on one node",
    ]
    assert not ProcessGrid(world, LayoutConfig(dp=4)).sum_facts["why_flat"]


def test_a_rank_may_read_parameters_while_the_rest_wait(world: Communicator) -> None:
    if world.size != 4:
        pytest.skip("four ranks")
    run = trainer_of(on_nodes_of(world, 2), "layout.dp=4", "layout.zero=1", "layout.hierarchical_sum=true")
    assert isinstance(run.grid.replicas, HierarchicalComm)
    for _ in range(STEPS):
        run.step()
        if world.rank == 0:
            assert bool(torch.isfinite(run.buffers.parameters).all())
        world.barrier()  # the others wait here for it, and it for the second step of their gathering


def test_sums_of_both_kinds_may_follow_each_other(world: Communicator) -> None:
    if world.size != 4:
        pytest.skip("four ranks")
    replicas = on_nodes_of(world, 2)(LayoutConfig(dp=4, hierarchical_sum=True)).replicas
    assert isinstance(replicas, HierarchicalComm)
    scattered, reduced = torch.arange(8.0) + world.rank, torch.arange(8.0) * (world.rank + 1)
    for pending in (replicas.start_reduce_scatter(scattered), replicas.start_all_reduce(reduced)):
        pending.wait()
    assert torch.equal(reduced, torch.arange(8.0) * 10)
    assert scattered[:2].tolist() == [4.0 * (2 * replicas.rank + n) + 6 for n in range(2)]


@pytest.mark.parametrize("zero", [0, 1])
def test_hidden_communication_is_measured_against_steps_without_overlap(world: Communicator, zero: int) -> None:
    if world.size != 2:
        pytest.skip("two ranks")
    run = trainer_of(on_nodes_of(world, 2), "layout.dp=2", f"layout.zero={zero}")
    overlap, readings = run.reducer.overlap, []
    for _ in range(6):
        run.step()
        readings.append(overlap.read())
    kinds = [kind for kind in (overlap.sums, overlap.gathers) if kind is not None]
    assert len(kinds) == 1 + zero and all(kind.alone_seconds is not None and kind.alone_seconds > 0 for kind in kinds)
    # the second and the third are the ones that are timed, and the parameters of the fourth arrive in the fifth
    assert [share is not None for share in readings] == [False, False, False, zero == 0, True, True]
    shares = [share for share in readings if share is not None]
    assert all(0.0 <= share <= 1.0 for share in shares)
    everywhere = world.all_gather(torch.tensor(shares, dtype=torch.float64))
    assert torch.equal(everywhere[0], everywhere[1])
