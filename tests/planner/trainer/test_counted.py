"""Tests of the time of an iteration from counted cycles and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.trainer.counted import (
    ATTENTION_PART,
    COMMUNICATION,
    COMPONENTS,
    ELEMENTWISE,
    ITERATION,
    OPTIMISER,
    PIPELINE,
    PRODUCTS,
    CountedPrediction,
    predict_counted,
)
from tests.planner.counted import counted_machine

MACHINE = counted_machine()


def _run(*settings: str, preset: str = "124m") -> RunConfig:
    return load_run_config(preset=preset, overrides=["layout.dp=4", "node.ranks_per_node=4", *settings])


def _predict(*settings: str, preset: str = "124m") -> CountedPrediction:
    return predict_counted(_run(*settings, preset=preset), MACHINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), ("layout.zero=1",), ("layout.dp=1", "layout.pp=4"), ("layout.dp=2", "layout.tp=2")]
)
def test_the_components_add_up_to_the_iteration(settings: "tuple[str, ...]") -> None:
    prediction = _predict(*settings)
    assert set(prediction.components) == set(COMPONENTS)
    works = list(prediction.components.values())
    total = prediction.total
    assert total.overlapped == pytest.approx(sum(work.overlapped for work in works))
    assert total.not_overlapped == pytest.approx(sum(work.not_overlapped for work in works))
    assert all(0 <= work.overlapped <= work.not_overlapped for work in works)
    assert (prediction.components[PIPELINE].overlapped > 0) == ("layout.pp=4" in settings)
    assert 0 < prediction.share_of_peak(total.not_overlapped) <= prediction.share_of_peak(total.overlapped) < 1


@pytest.mark.slow
def test_rounded_gradients_are_counted_where_no_replicas_sum_them() -> None:
    settings = ("layout.dp=1", "layout.pp=4")
    assert _predict(*settings, "training.gradient_dtype=bfloat16").total == _predict(*settings).total


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_a_pipeline_idles_for_as_long_as_passes_take(kind: str) -> None:
    prediction = _predict("layout.dp=1", "layout.pp=4", f"layout.schedule={kind}")
    idle, total = prediction.components[PIPELINE], prediction.total
    assert (idle.cores, idle.memory, idle.bound_by) == (0, 0, None)
    # passes take longer where cores and memory never overlap, and so does the wait for them
    assert idle.not_overlapped > 1.01 * idle.overlapped > 0
    works = [work for name, work in prediction.components.items() if name != PIPELINE]
    assert total.cores == pytest.approx(sum(work.cores for work in works))


def test_a_single_pipe_doubles_only_the_time_that_cores_bound() -> None:
    both_pipes, single_pipe = (
        _predict("node.freq_mhz=2000", "node.eco_state=0"),
        _predict("node.freq_mhz=2000", "node.eco_state=2"),
    )
    for name in (PRODUCTS, ATTENTION_PART, ELEMENTWISE, OPTIMISER):
        assert single_pipe.components[name].cores == pytest.approx(2 * both_pipes.components[name].cores)
        assert single_pipe.components[name].memory == pytest.approx(both_pipes.components[name].memory)
    assert single_pipe.components[PRODUCTS].overlapped == pytest.approx(2 * both_pipes.components[PRODUCTS].overlapped)
    assert single_pipe.components[COMMUNICATION] == both_pipes.components[COMMUNICATION]
    assert single_pipe.peak == pytest.approx(both_pipes.peak / 2) and both_pipes.peak == pytest.approx(6.144e12)
    assert "twice what is counted" in " ".join(single_pipe.assumptions)


def test_a_faster_clock_speeds_up_the_cores_alone() -> None:
    slow, fast = _predict("node.freq_mhz=2000", "node.eco_state=2"), _predict("node.freq_mhz=2200", "node.eco_state=2")
    assert fast.components[PRODUCTS].cores == pytest.approx(slow.components[PRODUCTS].cores / 1.1)
    assert fast.components[ELEMENTWISE].memory == pytest.approx(slow.components[ELEMENTWISE].memory)


@pytest.mark.slow
def test_the_figures_of_the_components_add_up_to_those_of_the_iteration() -> None:
    prediction = _predict("layout.dp=1", "layout.pp=4")
    *components, iteration = prediction.figures()
    assert [figures.name for figures in components] == list(COMPONENTS) and iteration.name == ITERATION
    assert sum(figures.share for figures in components) == pytest.approx(iteration.share) == 1.0
    assert sum(figures.lost for figures in components) == pytest.approx(iteration.lost)
    assert iteration.share_of_peak == pytest.approx(prediction.share_of_peak(prediction.total.overlapped))
    assert {figures.name for figures in components if figures.share_of_peak is not None} == {PRODUCTS, ATTENTION_PART}
    assert prediction.tokens_per_second(2.0) == _run().training.global_batch * 1024 / 2


def test_rates_are_those_of_an_iteration_that_takes_so_long() -> None:
    prediction = _predict()
    assert prediction.rate(4.0) == pytest.approx(prediction.total_flops / 4e12)
    assert prediction.notes_rate(4.0) == pytest.approx(prediction.notes_flops / 4e12)
    assert prediction.tokens_per_second(4.0) == pytest.approx(prediction.tokens / 4)
    assert prediction.share_of_peak(prediction.total_flops / prediction.peak) == pytest.approx(1.0)
    assert prediction.share_of_peak(3.0) == pytest.approx(prediction.total_flops / 3 / prediction.peak)


def test_flops_of_a_component_without_any_entry_are_not_those_of_the_iteration() -> None:
    prediction = replace(_predict(), flops={PRODUCTS: 1e12})
    with pytest.raises(KeyError, match=ATTENTION_PART):
        prediction.figures()


def test_products_at_the_peak_lose_only_to_edges_and_idle_threads() -> None:
    prediction = _predict()
    at_peak = prediction.flops[PRODUCTS] / prediction.peak
    assert 1.0 <= prediction.components[PRODUCTS].cores / at_peak < 1.03


def test_assumptions_state_the_counted_and_the_estimated() -> None:
    text = " ".join(_predict("layout.dp=1", "layout.tp=4", preset="1.3b").assumptions)
    for stated in ("llvm-mca", "256 GB/s for each 12 cores", "not in the figures: misses of the L1 cache", "add, copy"):
        assert stated in text
    assert "at the 5.28 GB/s of a rank to which rows of a64fx were fitted" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("job.nodes=2", "layout.dp=8"), "job.nodes 2, 8 ranks: cycles are counted for one node"),
        (("model.norm=rmsnorm",), "model.norm rmsnorm: cycles are counted of the kernels of a GPT-2 alone"),
        (("training.dtype=bfloat16",), "training.dtype bfloat16: cycles are counted of float32 kernels"),
        (("node.threads_per_rank=13",), r"4 ranks \* 13 threads: a node has 48 cores"),
        (
            ("training.gradient_dtype=bfloat16",),
            "training.gradient_dtype bfloat16: sums of rounded gradients over 4 replicas are not counted: leave it out",
        ),
        (
            ("node.compiled_kernels=false",),
            "node.compiled_kernels false: cycles are counted of our own kernels alone: set it to true",
        ),
        (
            ("node.compiled_products=off",),
            "node.compiled_products off: cycles are counted of our own products alone: set it to auto or on",
        ),
        (("layout.dp=1", "layout.tp=4"), "3 heads of a micro-batch on 12 threads: attention is left to PyTorch"),
    ],
)
def test_a_run_that_is_not_counted_is_refused(settings: "tuple[str, ...]", message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _predict(*settings)


def test_a_machine_of_measured_rows_has_no_cycles() -> None:
    with pytest.raises(UsageError, match="machine v100: its file has no counted cycles"):
        predict_counted(_run(), load_machine("v100"))
