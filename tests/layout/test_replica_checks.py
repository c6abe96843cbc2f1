"""Tests of what ranks compare by checksums, and of the communications for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List

import pytest

from fugaku_gpt.config import LayoutConfig, load_run_config
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.layout.communication_check import check_grid
from fugaku_gpt.layout.communications import ALL_REDUCES, Collective, plan_of, program
from fugaku_gpt.layout.flat import flat_layout_of
from fugaku_gpt.layout.replica_checks import comparisons, is_checksum_step
from fugaku_gpt.layout.trace_room import records_of_iteration

SP = "layout.sequence_parallel=true"


def compared(*settings: str, stage: int = 0) -> Dict[str, List[str]]:
    """The names of the compared tensors by communicator."""
    config = load_run_config(preset="tiny", overrides=["model.vocab_multiple=24", *settings])
    selected = comparisons(flat_layout_of(config, stage), config.layout, config.layout.sequence_parallel)
    return {comparison.communicator: [placed.spec.name for placed in comparison.tensors] for comparison in selected}


def test_replicas_compare_all_that_they_hold() -> None:
    config = load_run_config(preset="tiny", overrides=["layout.dp=4"])
    everything = [placed.spec.name for placed in flat_layout_of(config, 0).placed]
    assert compared("layout.dp=4") == {"dp": everything}


def test_tensor_parallel_ranks_compare_sums_of_two_replicas_at_most() -> None:
    assert compared("layout.tp=2") == {}
    plan, flat = LayoutConfig(), flat_layout_of(load_run_config(preset="tiny"), 0)
    assert comparisons(flat, plan, sequence_parallel=True) == []  # there is nobody to compare with
    alike = compared("layout.tp=2", SP)["tp"]
    assert "final_norm.weight" in alike and not any("mlp.up.weight" in name for name in alike)
    assert compared("layout.tp=2", "layout.dp=2", SP)["tp"] == alike
    assert set(compared("layout.tp=2", "layout.dp=3", "training.global_batch=12", SP)) == {"dp"}


def test_copies_of_keys_and_values_are_compared() -> None:
    copies = compared("layout.tp=2", "model.kv_heads=1")
    assert set(copies) == {"kv"} and all(".kv" in name for name in copies["kv"])


def test_the_stages_that_hold_the_embedding_compare_it() -> None:
    settings = ["layout.pp=3", "model.layers=3"]
    assert [compared(*settings, stage=stage) for stage in range(3)] == [
        {"embedding": ["token_embedding.weight"]},
        {},
        {"embedding": ["token_embedding.weight"]},
    ]


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.dp=4"],
        ["layout.dp=2", "layout.tp=2", SP, "layout.zero=1"],
        ["layout.dp=2", "layout.pp=2", "layout.zero=1"],
        ["layout.tp=2", "model.kv_heads=1"],
    ],
)
def test_a_step_with_checksums_cannot_get_stuck_and_makes_further_calls(layout: List[str]) -> None:
    plan = plan_of(load_run_config(preset="tiny", overrides=[*layout, "training.checksum_interval=5"]))
    with_checksums, without = check_grid(plan, run_all=True), check_grid(replace(plan, checksum_interval=None))
    assert with_checksums.communications > without.communications
    for stage in range(plan.layout.pp):
        usual, compares = program(plan, stage), program(plan, stage, has_checksums=True)
        added = [step for step in compares if isinstance(step, Collective) and step.operation == ALL_REDUCES["max"]]
        assert added and len(compares) == len(usual) + len(added) + 1  # the sum over the world


def test_a_trace_has_room_for_the_calls_of_a_comparison() -> None:
    settings = ["layout.dp=2"]
    calls = records_of_iteration(load_run_config(preset="tiny", overrides=settings), 0)[0]
    compares = load_run_config(preset="tiny", overrides=[*settings, "training.checksum_interval=1"])
    assert records_of_iteration(compares, 0)[0] == calls + 2


def test_the_interval_counts_iterations_from_the_first() -> None:
    assert [iteration for iteration in range(1, 10) if is_checksum_step(3, iteration)] == [3, 6, 9]
    assert not any(is_checksum_step(None, iteration) for iteration in range(10))


def test_a_single_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="training.checksum_interval: 5: one rank holds nothing"):
        load_run_config(preset="tiny", overrides=["training.checksum_interval=5"])
