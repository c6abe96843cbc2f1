"""Tests of measuring products: the verdict follows from the times, which a clock of the test's own counts."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.kernels.product_verdicts import (
    COMPILED,
    MEASURED_DTYPES,
    MIN_TURNS,
    ONEDNN,
    PYTORCH,
    read_verdicts,
)
from fugaku_gpt.ops import gemm, native, product_timing
from fugaku_gpt.ops.product_timing import measure_at_start, measure_missing, time_products
from tests.support.product_verdicts import product_verdict, use_verdict_file


class Machine:
    """A machine whose products take seconds of its own clock, by way; it computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.calls: List[str] = []
        for name in ("linear", "matmul", "add_product"):
            monkeypatch.setattr(gemm, name, self._product)
        monkeypatch.setattr(gemm, "has_onednn", lambda: ONEDNN in seconds)
        monkeypatch.setattr(native, "supports_native_matmul", lambda dtype: COMPILED in seconds)
        monkeypatch.setattr(product_timing, "has_kernel", lambda name, dtype: True)
        self.waited = 0.0  # seconds that its threads have waited for a core
        monkeypatch.setattr(product_timing.local, "seconds_without_core", lambda: self.waited)

    def clock(self) -> float:
        return self.now

    def _product(self, *tensors: torch.Tensor) -> None:
        way = COMPILED if RANK_CONSENSUS.compiled_products[torch.float32] else PYTORCH
        way = ONEDNN if way == PYTORCH and RANK_CONSENSUS.products_by_onednn else way
        self.calls.append(way)
        self.now += self.seconds[way]


def test_the_verdict_follows_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, compiled, onednn in (
        ({"pytorch": 0.002, "compiled": 0.001}, True, False),
        ({"pytorch": 0.001, "compiled": 0.002}, False, False),
        ({"pytorch": 0.002, "compiled": 0.002, "onednn": 0.001}, False, True),
        ({"pytorch": 0.004, "compiled": 0.001, "onednn": 0.002}, True, True),
    ):
        machine = Machine(monkeypatch, **seconds)
        verdict = time_products("float32", 1, 2.0, 10.0, machine.clock)
        assert (verdict.uses_compiled, verdict.uses_onednn) == (compiled, onednn), verdict
        assert verdict.turns >= MIN_TURNS and len(verdict.products) == 6 and machine.now < 10.0
        assert verdict.speedup(COMPILED) == pytest.approx(seconds["pytorch"] / seconds["compiled"])
        kinds = [(product.kind, product.inner, product.columns) for product in verdict.products]
        assert kinds[:2] == [("forward", 768, 3072), ("gradient of inputs", 3072, 768)]
        assert verdict.products[2].rows == 3072 and verdict.products[2].columns == 768


def test_all_ways_take_turns_and_each_begins_some(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, pytorch=0.001, onednn=0.001, compiled=0.001)
    turns = time_products("float32", 1, 2.0, 10.0, machine.clock).turns
    trials = 2 * 3 * 3  # of small products
    triples = [tuple(machine.calls[i : i + 3]) for i in range(trials, trials + 18 * (turns + 1), 3)]
    assert all(sorted(triple) == [COMPILED, ONEDNN, PYTORCH] for triple in triples)
    assert {triple[0] for triple in triples} == {COMPILED, ONEDNN, PYTORCH}


def test_one_slow_moment_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, pytorch=0.002, compiled=0.0021)
    multiply = machine._product
    count = iter(range(10**6))

    def product(*tensors: torch.Tensor) -> None:
        multiply(*tensors)
        if next(count) % 11 == 0:  # other work runs
            machine.now += 0.05

    for name in ("linear", "matmul", "add_product"):
        monkeypatch.setattr(gemm, name, product)
    assert not time_products("float32", 1, 2.0, 10.0, machine.clock).uses_compiled


def test_a_win_must_show_in_the_fastest_times_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch's is disturbed in most turns, its fastest turn shows what it can do."""
    machine = Machine(monkeypatch, pytorch=0.002, compiled=0.002)
    multiply = machine._product
    count = iter(range(10**6))

    def product(*tensors: torch.Tensor) -> None:
        multiply(*tensors)
        if machine.calls[-1] == PYTORCH and next(count) % 5:
            machine.now += 0.002

    for name in ("linear", "matmul", "add_product"):
        monkeypatch.setattr(gemm, name, product)
    assert not time_products("float32", 1, 2.0, 10.0, machine.clock).uses_compiled


@pytest.mark.parametrize(("share", "is_disturbed"), [(0.01, False), (0.4, True)])
def test_a_verdict_has_the_share_of_time_without_a_core(
    share: float, is_disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, pytorch=0.002, compiled=0.001)
    multiply = machine._product

    def product(*tensors: torch.Tensor) -> None:
        before = machine.now
        multiply(*tensors)
        machine.waited += 2 * share * (machine.now - before)  # both threads

    for name in ("linear", "matmul", "add_product"):
        monkeypatch.setattr(gemm, name, product)
    verdict = time_products("float32", 2, 2.0, 10.0, machine.clock)
    assert verdict.wait_share == pytest.approx(share) and verdict.is_disturbed == is_disturbed
    assert ("other work had the cores for 40% of the time" in verdict.describe()) == is_disturbed
    monkeypatch.setattr(product_timing.local, "seconds_without_core", lambda: None)
    assert time_products("float32", 2, 2.0, 10.0, machine.clock).wait_share is None


@pytest.mark.parametrize("seconds", [0.3, 3.0, 60.0])
def test_the_time_is_bounded_on_a_slow_processor(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, pytorch=seconds, compiled=seconds / 4)
    verdict = time_products("float32", 1, 2.0, 10.0, machine.clock)
    assert verdict.turns == 0 and not verdict.products and not verdict.uses_compiled
    assert machine.now <= 10.0 + 1.25 * seconds


def test_a_slow_processor_gets_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = time_products("float32", 1, 2.0, 10.0, Machine(monkeypatch, pytorch=1e-5, compiled=1e-5).clock)
    slow = time_products("float32", 1, 2.0, 10.0, Machine(monkeypatch, pytorch=0.02, compiled=0.02).clock)
    assert quick.products[0].rows == 1024 and slow.products[0].rows == 128


def test_choices_and_threads_of_this_process_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    ops.choose_native_matmul(True, torch.float32)
    before = copy.deepcopy(RANK_CONSENSUS)
    machine = Machine(monkeypatch, pytorch=0.001, compiled=0.001)
    time_products("float32", threads + 1, 2.0, 10.0, machine.clock)
    assert before == RANK_CONSENSUS and torch.get_num_threads() == threads
    machine.seconds = {}  # so that the first product fails
    with pytest.raises(KeyError):
        time_products("float32", threads + 1, 2.0, 10.0, machine.clock)
    assert before == RANK_CONSENSUS and torch.get_num_threads() == threads


def test_without_another_way_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, pytorch=1.0)
    verdict = time_products("float32", 1, 2.0, 10.0, machine.clock)
    assert not machine.calls and verdict.describe() == "measured: there is no other way (float32, 1 thread)"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """Replaces measuring; returns what was measured."""
    keys: List[Any] = []

    def measured(dtype: str, threads: int, *limits: float) -> Any:
        keys.append((dtype, threads))
        return product_verdict(dtype, threads, compiled=1.5)

    monkeypatch.setattr(product_timing, "time_products", measured)
    return keys


def test_verdicts_missing_from_the_file_are_measured_and_written(
    timed: List[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_verdict_file(monkeypatch, tmp_path / "products.json", product_verdict("float32", 1, compiled=0.5))
    answer = measure_missing([2, 1])
    assert timed == [("float32", 2), ("bfloat16", 1), ("bfloat16", 2)]
    assert [(row["dtype"], row["threads"]) for row in answer["verdicts"]] == [
        (dtype, threads) for dtype in MEASURED_DTYPES for threads in (1, 2)
    ]
    assert answer["measured_anew"] and not answer["problem"] and answer["file"] == str(tmp_path / "products.json")
    again: Dict[str, Any] = measure_missing([2, 1])
    assert len(timed) == 3 and not again["measured_anew"] and again["verdicts"] == answer["verdicts"]
    assert measure_missing([1], again=True)["measured_anew"] == "asked for" and len(timed) == 5


def test_a_measurement_that_other_work_disturbed_is_measured_again(
    timed: List[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "products.json"
    verdicts = [product_verdict(dtype, 1, compiled=0.5) for dtype in MEASURED_DTYPES]
    use_verdict_file(monkeypatch, file, replace(verdicts[0], wait_share=0.6), verdicts[1])
    answer = measure_missing([1])
    assert timed == [("float32", 1)] and answer["measured_anew"] == "other work had disturbed some measurements"
    assert [row["wait_share"] for row in answer["verdicts"]] == [None, None]
    recorded, _ = read_verdicts(file, product_timing.current_stamp())
    assert recorded["float32", 1].uses_compiled and not recorded["bfloat16", 1].uses_compiled
    assert not measure_missing([1])["measured_anew"] and len(timed) == 1


def test_the_usual_numbers_of_threads_are_one_a_memory_node_s_and_all(
    timed: List[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_verdict_file(monkeypatch, tmp_path / "products.json")
    monkeypatch.setattr(product_timing.local, "usable_cores", lambda: list(range(12, 60)))
    monkeypatch.setattr(product_timing.local, "group_by_numa_node", lambda cores: [cores[i::4] for i in range(4)])
    measure_missing()
    assert timed == [(dtype, threads) for dtype in MEASURED_DTYPES for threads in (1, 12, 48)]


def test_verdicts_written_by_another_process_hold_at_a_start(
    timed: List[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_verdict_file(monkeypatch, tmp_path / "products.json", product_verdict("float32", 3, compiled=0.5))
    verdict, problem = measure_at_start("float32", 3)
    assert timed == [("float32", 3)] and not verdict.uses_compiled and not problem


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_products_of_this_machine_are_computed_in_every_way(dtype: str) -> None:
    ticks = itertools.count()
    verdict = time_products(dtype, 1, 0.5, 60.0, lambda: 0.01 * next(ticks))  # each product takes one tick
    ways = product_timing._ways(getattr(torch, dtype))
    assert ways[0] == PYTORCH and verdict.turns >= MIN_TURNS
    assert [set(product.speedups) for product in verdict.products] == [set(ways[1:])] * (6 if len(ways) > 1 else 0)
    ratios = [ratio for product in verdict.products for ratio in product.speedups.values()]
    assert ratios == pytest.approx([1.0] * len(ratios)) and not verdict.uses_compiled and not verdict.uses_onednn
