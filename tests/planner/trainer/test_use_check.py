"""Tests that `generate` and `eval` are refused exactly where they do not fit into the memory of a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

import pytest

from fugaku_gpt.config import LayoutConfig, RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.framework import Framework
from fugaku_gpt.planner.trainer.generation_memory import (
    GenerationSize,
    bytes_of_node,
    evaluation_memory,
    generation_memory,
)
from fugaku_gpt.planner.trainer.memory_check import NodeLimits
from fugaku_gpt.planner.trainer.run_memory import MIB
from fugaku_gpt.planner.trainer.use_check import refuse_too_large_evaluation, refuse_too_large_generation
from tests.support.models import model_of_kind

BASE = Framework(200 * MIB, 100 * MIB)
SIZE = GenerationSize(4, 20)
RUN = RunConfig(model=model_of_kind("llama", "model.layers=4", "model.vocab_size=400000"))


def limit_of(size: int) -> NodeLimits:
    return NodeLimits(((size, "this machine"),), BASE, 4)


def smallest_that_fits(check: Callable[[NodeLimits], None]) -> int:
    """The smallest limit in bytes, guard margin included, that the check lets pass."""
    low, high = 0, 2**40
    while low < high:
        middle = (low + high) // 2
        try:
            check(limit_of(middle))
            high = middle
        except UsageError:
            low = middle + 1
    return low


@pytest.mark.parametrize("ranks", [[0], [0, 1], [2, 3], [0, 1, 2, 3]])
def test_generation_is_refused_below_the_bytes_of_the_ranks_of_a_node(ranks: Sequence[int]) -> None:
    run = replace(RUN, layout=LayoutConfig(tp=2, pp=2))
    stages = generation_memory(run, SIZE, BASE)
    expected = bytes_of_node(stages, [rank // 2 for rank in ranks], BASE)
    size = smallest_that_fits(lambda node: refuse_too_large_generation(run, SIZE, node, ranks))
    limit = limit_of(size).smallest_limit(run)
    assert limit is not None and limit[0] >= expected
    below = limit_of(size - 1).smallest_limit(run)
    assert below is not None and below[0] < expected


def test_ranks_of_a_node_share_the_pages_of_libraries() -> None:
    (alone,) = generation_memory(RUN, SIZE, BASE)
    assert bytes_of_node([alone], [0], BASE) == sum(alone.values())
    assert bytes_of_node([alone], [0, 0], BASE) == 2 * sum(alone.values()) - BASE.shared_bytes


def test_a_refusal_has_the_sizes_and_the_remedies() -> None:
    with pytest.raises(UsageError) as refused:
        refuse_too_large_generation(RUN, SIZE, limit_of(400 * MIB), [0])
    message = str(refused.value)
    assert message.startswith("generation of 4 texts of 20 tokens on each replica needs ")
    assert " MiB of a node for 1 rank; there are " in message and "(this machine, less what the memory guard" in message
    assert "--batch" in message and "--tp" in message and "--no-memory-check" in message and "weights 50" in message
    with pytest.raises(UsageError, match="an evaluation of 8 windows at a time needs .* for 2 ranks"):
        refuse_too_large_evaluation(replace(RUN, layout=LayoutConfig(tp=2)), 8, limit_of(400 * MIB), [0, 1])


def test_an_evaluation_has_no_cache_and_the_workspace_of_all_windows() -> None:
    (one,), (eight,) = evaluation_memory(RUN, 1, BASE), evaluation_memory(RUN, 8, BASE)
    assert one["cache"] == eight["cache"] == 0 and one["weights"] == eight["weights"]
    assert eight["workspace"] == 8 * one["workspace"] and eight["logits"] == 8 * one["logits"] > 0
    (many,) = evaluation_memory(RUN, 1000, BASE)
    assert many["logits"] == RUN.padded_vocab * 512 * 8
