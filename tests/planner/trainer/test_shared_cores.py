"""Tests of what a run costs whose threads share cores."""

from __future__ import annotations

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.planner.trainer.seconds import RunCost, prior_constants
from tests.planner.probes import even_machine

CONSTANTS = prior_constants().values


def fixed_seconds(threads: int) -> float:
    """The fixed seconds of an iteration of two ranks on two cores, which grow with the threads for each core."""
    settings = ["layout.dp=2", f"node.threads_per_rank={threads}", "training.global_batch=4"]
    return RunCost(load_run_config(overrides=settings), even_machine()).seconds_by_component(CONSTANTS)["fixed"]


@pytest.mark.parametrize(("threads", "share"), [(1, 1.0), (2, 2.0), (3, 3.0)])
def test_fixed_seconds_grow_with_the_threads_of_each_core(threads: int, share: float) -> None:
    assert fixed_seconds(threads) - fixed_seconds(1) == pytest.approx((share - 1) * CONSTANTS["fixed"])
