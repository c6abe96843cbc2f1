"""Tests of the sums over the categories, ranks and nodes of a run's memory, without PyTorch."""

from __future__ import annotations

from fugaku_gpt.planner.trainer.run_memory import RunMemory

MEMORY = RunMemory(({"weights": 1}, {"weights": 3, "gradients": 2}, {"weights": 5}), {"weights": 6, "system": 7}, 1)


def test_the_peak_stage_is_the_first_of_those_that_need_most() -> None:
    assert [MEMORY.bytes_of_stage(stage) for stage in range(3)] == [1, 5, 5]
    assert (MEMORY.peak_stage, MEMORY.bytes_of_rank, MEMORY.bytes_of_node) == (1, 5, 13)


def test_the_ranks_of_a_node_share_what_is_shared() -> None:
    assert MEMORY.bytes_of_ranks([0]) == 1
    assert MEMORY.bytes_of_ranks([0, 1, 1]) == 0 + 4 + 4 + 1
