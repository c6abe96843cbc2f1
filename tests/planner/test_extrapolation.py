"""What lies outside of the fitted rows is said, and widens the interval by how far it is."""

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


def _far(**changed: Any) -> float:
    row = replace(INSIDE, **changed)
    return extrapolation_distance(
        [*extrapolated_inputs(row, MACHINE.time.input_ranges), *rule_based_inputs(row, True, MACHINE.time.input_ranges)]
    )


def test_distance_is_the_root_of_the_squares_of_logarithms() -> None:
    assert _far() == 0.0
    micro_batch, seq_len = MACHINE.time.input_ranges["micro_batch"][1], MACHINE.time.input_ranges["seq_len"][1]
    assert _far(micro_batch=3 * micro_batch) == pytest.approx(math.log(3))
    assert _far(micro_batch=3 * micro_batch, seq_len=4 * seq_len) == pytest.approx(math.hypot(math.log(3), math.log(4)))
    assert _far(vocab=51200) == 0.0  # padded a little further
    assert _far(ranks_per_node=12) == pytest.approx(math.log(3))
    assert _far(freq_ghz=1.0) == pytest.approx(math.log(2))
    assert _far(freq_ghz=0.0) == _far(torch="2.13") == _far(sequence_parallel=True) == pytest.approx(math.log(2))
    assert _far(chunks=4, sequence_parallel=True) == pytest.approx(math.sqrt(2) * math.log(2))


def test_every_input_of_a_row_that_is_its_own_hull_is_inside() -> None:
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

    def width(guess: Estimate) -> float:
        return math.log(guess.high / guess.value) / NORMAL_80

    for found, plain in zip(predict_rows(machine, rows), predict_rows(inside, rows)):
        far = extrapolation_distance(extrapolated_inputs(found.row, machine.time.input_ranges))
        assert width(found.seconds) == pytest.approx(
            total_width(width(plain.seconds), 0.0, machine.time.beyond_spread, far)
        )
        assert (far > 0) == (width(found.seconds) > width(plain.seconds)) == (found.row is not row)


@pytest.mark.parametrize("name", ["a64fx", "a100"])
def test_intervals_hold_rows_of_tables_that_no_fit_has_seen(name: str) -> None:
    machine = load_machine(name)
    problem = time_problem(machine, of_hardware(next(iter(machine.hardware))[:4]))
    rows = [
        one
        for one in predict_left_out(problem, "table", problem.initial_values)
        if one.measured.status == "ok" and not one.repeated
    ]
    time = machine.time
    held = np.array(
        [
            abs(math.log(one.predicted / (one.measured.seconds or math.nan)))
            <= NORMAL_80 * total_width(one.width, time.interval_spread, time.beyond_spread, one.distance)
            for one in rows
        ]
    )
    beyond = np.array([one.distance > 0 for one in rows])
    assert beyond.sum() >= 10
    assert 0.7 <= held.mean() <= 0.9 and 0.7 <= held[beyond].mean() <= 0.9


def test_ranks_on_more_nodes_than_any_row_has_with_so_many_of_them_are_named() -> None:
    def said(**changed: int) -> List[str]:
        row = replace(INSIDE, **changed)
        assert not extrapolated_inputs(row, MACHINE.time.input_ranges)
        return [one.text for one in rule_based_inputs(row, True, MACHINE.time.input_ranges)]

    assert INSIDE.ranks_per_node == 4 and said() == [] == said(nodes=512, ranks_per_node=1)
    assert said(nodes=512) == ["ranks_per_node 4 on 512 nodes: measured on 1"]
    two = replace(INSIDE, nodes=512, ranks_per_node=2)
    assert (
        len(extrapolated_inputs(two, MACHINE.time.input_ranges))
        == len(rule_based_inputs(two, True, MACHINE.time.input_ranges))
        == 1
    )


def test_what_no_row_of_any_machine_has_widens_the_interval_too() -> None:
    (plain, cut) = predict_rows(MACHINE, [replace(INSIDE, sequence_parallel=on) for on in (False, True)])
    assert plain.seconds.value == cut.seconds.value  # there is one tensor-parallel rank
    assert not plain.extrapolated and cut.seconds.high > 1.005 * plain.seconds.high


def test_a_row_keeps_its_words() -> None:
    row: ConfigRow = replace(INSIDE, freq_ghz=0.0, micro_batch=64)
    texts = [one.text for one in extrapolated_inputs(row, MACHINE.time.input_ranges)]
    assert texts == ["micro_batch 64: measured 1 to 4", "freq_ghz not given: measured 2.0, 2.2"]
