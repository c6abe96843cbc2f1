"""Tests of extrapolation: inputs outside of the fitted rows are named, and widen the interval with the distance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, List

import numpy as np
import pytest

from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.extrapolation import (
    extrapolated_inputs,
    extrapolation_distance,
    input_ranges_of,
    rule_based_inputs,
)
from fugaku_gpt.planner.intervals import NORMAL_80, Estimate, total_width
from fugaku_gpt.planner.tables.fitting import predict_left_out, time_problem
from fugaku_gpt.planner.tables.predict import predict_rows
from fugaku_gpt.planner.tables.rows import ConfigRow
from tests.planner.samples import of_hardware

MACHINE = load_machine("a64fx")
INSIDE = of_hardware("A64FX")[0][0]


def _distance(**changed: Any) -> float:
    row = replace(INSIDE, **changed)
    return extrapolation_distance(
        [*extrapolated_inputs(row, MACHINE.time.input_ranges), *rule_based_inputs(row, True, MACHINE.time.input_ranges)]
    )


def test_distance_is_the_root_of_the_squares_of_logarithms() -> None:
    assert _distance() == 0.0
    micro_batch, seq_len = MACHINE.time.input_ranges["micro_batch"][1], MACHINE.time.input_ranges["seq_len"][1]
    assert _distance(micro_batch=3 * micro_batch) == pytest.approx(math.log(3))
    assert _distance(micro_batch=3 * micro_batch, seq_len=4 * seq_len) == pytest.approx(
        math.hypot(math.log(3), math.log(4))
    )
    assert _distance(vocab=51200) == 0.0  # padded a little further
    assert _distance(ranks_per_node=12) == pytest.approx(math.log(3))
    assert _distance(freq_ghz=1.0) == pytest.approx(math.log(2))
    assert (
        _distance(freq_ghz=0.0)
        == _distance(torch="2.13")
        == _distance(sequence_parallel=True)
        == pytest.approx(math.log(2))
    )
    assert _distance(chunks=4, sequence_parallel=True) == pytest.approx(math.sqrt(2) * math.log(2))


def test_a_row_is_inside_the_ranges_of_that_row() -> None:
    for row, _ in of_hardware("A100"):
        assert (
            extrapolated_inputs(row, input_ranges_of([row])) == []
            and extrapolated_inputs(row, input_ranges_of([])) == []
        )


@pytest.mark.parametrize("name", ["a64fx", "a100", "v100"])
def test_intervals_widen_with_the_distance(name: str) -> None:
    machine = load_machine(name)
    (row, _), *_ = of_hardware(next(iter(machine.hardware))[:4])
    rows = [replace(row, torch="0.4", zero=zero) for zero in (0, 3)] + [row]
    inside = replace(machine, time=replace(machine.time, beyond_spread=0.0))

    def width(estimate: Estimate) -> float:
        return math.log(estimate.high / estimate.value) / NORMAL_80

    for prediction, plain in zip(predict_rows(machine, rows), predict_rows(inside, rows)):
        distance = extrapolation_distance(extrapolated_inputs(prediction.row, machine.time.input_ranges))
        assert width(prediction.seconds) == pytest.approx(
            total_width(width(plain.seconds), 0.0, machine.time.beyond_spread, distance)
        )
        assert (distance > 0) == (width(prediction.seconds) > width(plain.seconds)) == (prediction.row is not row)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a64fx", "a100"])
def test_intervals_hold_rows_of_tables_that_no_fit_has_seen(name: str) -> None:
    machine = load_machine(name)
    problem = time_problem(machine, of_hardware(next(iter(machine.hardware))[:4]))
    rows = [
        prediction
        for prediction in predict_left_out(problem, "table", problem.initial_values)
        if prediction.measured.status == "ok" and not prediction.repeated
    ]
    time = machine.time
    is_within = np.array(
        [
            abs(math.log(prediction.predicted / (prediction.measured.seconds or math.nan)))
            <= NORMAL_80 * total_width(prediction.width, time.interval_spread, time.beyond_spread, prediction.distance)
            for prediction in rows
        ]
    )
    is_extrapolated = np.array([prediction.distance > 0 for prediction in rows])
    assert is_extrapolated.sum() >= 10
    assert 0.7 <= is_within.mean() <= 0.9 and 0.7 <= is_within[is_extrapolated].mean() <= 0.9


def test_ranks_per_node_on_more_nodes_than_measured_are_named() -> None:
    def texts(**changed: int) -> List[str]:
        row = replace(INSIDE, **changed)
        assert not extrapolated_inputs(row, MACHINE.time.input_ranges)
        return [extrapolated.text for extrapolated in rule_based_inputs(row, True, MACHINE.time.input_ranges)]

    assert INSIDE.ranks_per_node == 4 and texts() == [] == texts(nodes=512, ranks_per_node=1)
    assert texts(nodes=512) == ["ranks_per_node 4 on 512 nodes: measured on 1"]
    two_ranks = replace(INSIDE, nodes=512, ranks_per_node=2)
    assert (
        len(extrapolated_inputs(two_ranks, MACHINE.time.input_ranges))
        == len(rule_based_inputs(two_ranks, True, MACHINE.time.input_ranges))
        == 1
    )


def test_a_feature_that_no_machine_measured_widens_the_interval() -> None:
    (plain, sharded) = predict_rows(MACHINE, [replace(INSIDE, sequence_parallel=on) for on in (False, True)])
    assert plain.seconds.value == sharded.seconds.value  # there is one tensor-parallel rank
    assert not plain.extrapolated and sharded.seconds.high > 1.005 * plain.seconds.high


def test_extrapolated_inputs_are_described() -> None:
    row: ConfigRow = replace(INSIDE, freq_ghz=0.0, micro_batch=64)
    texts = [extrapolated.text for extrapolated in extrapolated_inputs(row, MACHINE.time.input_ranges)]
    assert texts == ["micro_batch 64: measured 1 to 4", "freq_ghz not given: measured 2.0, 2.2"]
