"""Tests of the sums over the categories, ranks and nodes of a run's memory, without PyTorch."""

from __future__ import annotations

from fugaku_gpt.config import load_run_config
from fugaku_gpt.planner.trainer.memory_check import _with_ranks_per_node
from fugaku_gpt.planner.trainer.run_memory import RunMemory

MEMORY = RunMemory(({"weights": 1}, {"weights": 3, "gradients": 2}, {"weights": 5}), {"weights": 6, "system": 7}, 1)


def test_the_peak_stage_is_the_first_of_those_that_need_most() -> None:
    assert [MEMORY.bytes_of_stage(stage) for stage in range(3)] == [1, 5, 5]
    assert (MEMORY.peak_stage, MEMORY.bytes_of_rank, MEMORY.bytes_of_node) == (1, 5, 13)


def test_the_ranks_of_a_node_count_shared_bytes_once() -> None:
    assert MEMORY.bytes_of_ranks([0]) == 1
    assert MEMORY.bytes_of_ranks([0, 1, 1]) == 0 + 4 + 4 + 1


def test_ranks_are_spread_over_fewer_or_more_nodes_where_they_fill_them() -> None:
    settings = ["layout.dp=12", "training.global_batch=12", "job.nodes=6", "node.ranks_per_node=2"]
    config = load_run_config(overrides=settings)
    for ranks_per_node, nodes in ((1, 12), (3, 4), (4, 3), (12, 1)):
        spread = _with_ranks_per_node(config, ranks_per_node)
        assert (spread.job.nodes, spread.node.ranks_per_node) == (nodes, ranks_per_node)
    assert _with_ranks_per_node(config, 5) is config and _with_ranks_per_node(config, 2) is config
