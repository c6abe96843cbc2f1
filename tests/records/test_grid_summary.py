"""Tests of the summary of runs whose batches take turns in size."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import pytest

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.flops import exact_flops
from fugaku_gpt.records.summary import KEYS, summarise

CONFIG = load_run_config(preset="arc-nano", overrides=["training.global_batch=32"])


def line(iteration: int, seconds: float, **buckets: int) -> Dict[str, Any]:
    """Returns a line of an iteration, or of several; ``buckets``: iterations of each, as b16 or b30."""
    figures = {name[1:]: {"iterations": count, "loss": 5.0, "accuracy": 0.1} for name, count in buckets.items()}
    return {"iteration": iteration, "seconds": seconds, "loss": 5.0, "accuracy": 0.25, "buckets": figures}


def summary_of(lines: Sequence[Dict[str, Any]], config: RunConfig = CONFIG) -> Dict[str, Any]:
    return summarise(config, lines, [{"loss": 6.0, "accuracy": 0.0}, {"loss": 4.0, "accuracy": 0.5}])


def test_the_time_is_that_of_each_size_by_how_often_it_comes() -> None:
    seconds = [(30, 9.0), (16, 3.0), (16, 1.0), (30, 4.0), (16, 1.0), (16, 100.0), (30, 6.0)]
    lines = [line(number, time, **{f"b{side}": 1}) for number, (side, time) in enumerate(seconds, 1)]
    summary = summary_of(lines)
    # after two lines: 16 took 1, 1 and 100 seconds, 30 took 4 and 6
    assert summary["seconds_per_iteration"] == pytest.approx((3 * 1.0 + 2 * 5.0) / 5)
    assert summary["images_per_second"] == pytest.approx(32 / 2.6)
    assert summary["tokens_per_second"] == pytest.approx(32 * (3 * 256 + 2 * 900) / 5 / 2.6)
    assert summary["compile_seconds"] == pytest.approx(9.0 - 5.0)
    assert summary["last_accuracy"] == 0.25 and summary["last_validation_accuracy"] == 0.5
    assert set(summary) <= set(KEYS)
    flops = exact_flops(CONFIG.model, 32, CONFIG.padded_outputs)
    assert summary["tflops_exact"] < flops / 2.6 / 1e12  # most batches are of small grids


def test_lines_of_several_iterations_count_by_their_mixture() -> None:
    lines = [line(4, 3.0, b16=3, b30=1), line(8, 2.0, b16=3, b30=1), line(12, 4.0, b16=2, b30=2)]
    summary = summary_of(lines)
    assert summary["seconds_per_iteration"] == pytest.approx(4.0)  # one line after the warm-up
    assert summary["compile_seconds"] == pytest.approx((3.0 - 2.0) * 4)


def test_without_a_second_iteration_of_the_size_there_is_no_time_of_compiling() -> None:
    assert "compile_seconds" not in summary_of([line(1, 9.0, b30=1), line(2, 1.0, b16=1), line(3, 1.0, b16=1)])
    # a run that was resumed after iteration 4 shows no first iteration
    assert "compile_seconds" not in summary_of([line(5, 9.0, b16=1), line(6, 1.0, b16=1), line(7, 1.0, b16=1)])


def test_lines_that_do_not_say_their_size_have_images_and_no_other_speed() -> None:
    lines = [{"iteration": number, "seconds": 2.0, "loss": 5.0} for number in range(1, 5)]
    damaged = [{**of_line, "buckets": {"16": {"iterations": "x"}, "7": {"iterations": 1}}} for of_line in lines]
    for unknown in (lines, damaged):
        summary = summary_of(unknown)
        assert summary["images_per_second"] == 32 / 2.0
        assert not {"tokens_per_second", "tflops_notes", "tflops_exact", "compile_seconds"} & set(summary)
    only = load_run_config(preset="arc-small", overrides=["training.global_batch=32"])
    assert summary_of(lines, only)["tokens_per_second"] == 32 * 900 / 2.0
