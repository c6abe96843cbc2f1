"""Tests of the time of a step's parts: own time, and the table."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import List

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import where  # noqa: E402
from where import (  # noqa: E402
    ATTENTION,
    ATTENTION_REST,
    LAYERS,
    LOGITS,
    LOSS_REST,
    NORM_GELU,
    REST,
    Clock,
    calls_table,
    table,
    watched,
)

from tests.training.trainers import tiny_trainer  # noqa: E402


class ManualClock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def manual_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(where, "time", clock)
    return clock


def test_a_call_s_own_time_excludes_the_calls_inside_it_and_is_counted_while_the_clock_runs(
    manual_clock: ManualClock,
) -> None:
    clock = Clock()
    outer, inner = clock.of(lambda: LOSS_REST, "loss"), clock.of(lambda: LOGITS, "linear")
    around: List[List[str]] = []

    def step(own: float, inside: float) -> None:
        clock.turns.append(defaultdict(list))
        with outer():
            manual_clock.seconds += own
            for _ in range(2):
                with inner():
                    manual_clock.seconds += inside
                    around.append(list(clock.around))

    step(5.0, 7.0)
    assert not clock.turns[0]
    clock.runs = True
    step(1.0, 2.0)
    step(3.0, 4.0)
    assert clock.seconds(LOSS_REST) == [0.0, 1.0, 3.0] and clock.seconds(LOGITS) == [0.0, 4.0, 8.0]
    assert clock.quickest(LOGITS) == 4.0 and clock.calls(LOGITS) == 2
    assert around == [[LOSS_REST, LOGITS]] * 6 and clock.around == []


def test_the_table_shows_each_part_beside_the_floor_s_products(manual_clock: ManualClock) -> None:
    clock = Clock()
    clock.runs = True
    for seconds in (4.0, 2.0, 3.0):
        clock.turns.append(defaultdict(list))
        for part in (LAYERS, ATTENTION, NORM_GELU):
            with clock.of(lambda part=part: part, "some")():
                manual_clock.seconds += seconds
    floors = [
        {"qkv forward": [3, 1.0], "attention keys": [1, attention_seconds]} for attention_seconds in (2.0, 1.0, 4.0)
    ]
    lines = table(clock, [14.0, 8.0, 10.0], floors)
    cells = {line[:30].strip(): line[30:].split() for line in lines}
    assert cells[LAYERS] == ["1", "3.000", "30.0%", "2.000", "3.000", "3.000"]
    assert cells[ATTENTION] == ["1", "3.000", "30.0%", "2.000", "2.000", "1.000"]
    assert cells[NORM_GELU] == ["1", "3.000", "30.0%", "2.000"]
    assert cells[REST] == ["2.000", "20.0%", "1.000"]  # 14 - 12, 8 - 6, 10 - 9
    assert cells["a step"] == ["10.000", "100.0%", "7.000", "5.000", "4.000"]
    assert lines[-1] == "of the floor: 2.000 (1.429-2.800); the quickest of both: 1.750"


def test_every_kind_and_shape_of_call_has_a_line(manual_clock: ManualClock) -> None:
    clock = Clock()
    clock.runs = True
    linear = clock.of(lambda: LAYERS, "linear")
    for seconds in (4.0, 1.0, 2.0):
        clock.turns.append(defaultdict(list))
        for shape, times in (((2, 3), 2), ((5,), 1)):
            for _ in range(times):
                with linear(torch.zeros(shape), torch.zeros(3)):
                    manual_clock.seconds += seconds * times
    lines = calls_table(clock)
    assert [line.split() for line in lines[1:]] == [
        f"{LAYERS} linear 2 4000.000 8.000 [2, 3] [3]".split(),
        f"{LAYERS} linear 1 2000.000 2.000 [5] [3]".split(),
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_part_of_a_real_step_is_timed_and_the_functions_are_restored(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fugaku_gpt import ops
    from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
    from fugaku_gpt.model.attention_core import _CompiledAttention, _TiledAttention

    if compiled and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", None)  # the choice of this test ends with it
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # with more threads, the heads are too few for the kernels

    def functions() -> List[object]:
        ways = [getattr(way, name) for way in (_TiledAttention, _CompiledAttention) for name in ("forward", "backward")]
        return [ops.linear, ops.attention, *ways]

    before = functions()
    clock = Clock()
    with watched(clock):
        run = tiny_trainer("model.dropout=0", "model.attention_dropout=0", f"node.compiled_kernels={compiled}")
        clock.turns.append(defaultdict(list))
        clock.runs = True
        run.step()
        clock.runs = False
    assert functions() == before
    calls = {part: clock.calls(part) for part in where.PART_NAMES}
    layers, passes = run.config.model.layers, run.config.micro_batches
    assert calls[LAYERS] == 4 * 3 * layers * passes  # four linear layers, each multiplied in three ways
    assert calls[LOGITS] % (3 * passes) == 0 and calls[LOSS_REST] >= passes
    assert all(calls.values())
    if compiled:
        assert calls[ATTENTION] == calls[ATTENTION_REST] == 2 * layers * passes
