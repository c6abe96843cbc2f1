"""Tests of which rank writes which part of a checkpoint."""

from __future__ import annotations

import pytest

from fugaku_gpt.layout.shards import regions_to_write
from fugaku_gpt.training.save_plan import SavePlan
from fugaku_gpt.training.state import KINDS
from tests.support.tiny import tiny_config


def test_each_of_many_ranks_plans_its_own_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 13,824 planned the files of all, while they waited for minutes."""
    config = tiny_config("layout.dp=6", "layout.zero=1", "checkpoint.ranks_per_file=2", "training.global_batch=12")
    plan = SavePlan(config, KINDS, range(6))
    planned = []
    monkeypatch.setattr(
        "fugaku_gpt.training.save_plan.regions_to_write",
        lambda config, coordinates, shard: planned.append(shard) or regions_to_write(config, coordinates, shard),
    )
    file = plan.data_file(1)
    summary = plan.summarize(file)
    assert planned == [2, 3]
    assert (summary.bytes, summary.entries) == (file.length, len(plan.pieces(2)) + len(plan.pieces(3)))


def test_a_manifest_with_another_number_of_checksums_than_pieces_is_not_made() -> None:
    plan = SavePlan(tiny_config(), KINDS, [0])
    summary = plan.summarize(plan.data_file(0))
    state = {"iteration": 1, "consumed_samples": 1, "consumed_tokens": 8}
    assert plan.manifest(state, [summary], [[0] * summary.entries]).files[0].bytes == summary.bytes
    for summaries, checksums in (([summary], [[0]]), ([None], [[]])):
        with pytest.raises(ValueError, match="data-000000.safetensors: "):
            plan.manifest(state, summaries, checksums)
