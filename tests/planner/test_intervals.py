"""Tests of the widths of predicted figures, by hand."""

from __future__ import annotations

import math
from typing import Dict, Mapping

import numpy as np
import pytest

from fugaku_gpt.machine.constants import Constant, FittedModel
from fugaku_gpt.planner.intervals import TOTAL, Estimate, log_widths, total_width

A, B = Constant("a", "", 2.0, 0.5, 2.0, 0.3), Constant("b", "", 6.0, 0.5, 6.0, 0.4)
FIXED = Constant("c", "", 5.0, 0.0, 5.0, 0.0)
FITTED = FittedModel((A, B, FIXED), 0.1, interval_spread=0.0, beyond_spread=0.2)


def components(values: Mapping[str, float]) -> "Dict[str, np.ndarray]":
    """Two components of two rows; the second is nothing in the second row."""
    return {"first": values["a"] * np.array([1.0, 10.0]), "second": values["b"] * np.array([1.0, 0.0])}


def test_a_component_is_as_uncertain_as_the_constant_and_the_sum_as_both() -> None:
    widths = log_widths(components, FITTED)
    assert widths["first"] == pytest.approx([0.3, 0.3], rel=1e-3)
    assert widths["second"] == pytest.approx([0.4, 0.0], rel=1e-3)
    assert widths[TOTAL] == pytest.approx([math.hypot(0.25 * 0.3, 0.75 * 0.4), 0.3], rel=1e-3)


def test_distances_widen() -> None:
    beyond = log_widths(components, FITTED, distance=np.array([0.0, 2.0]))["first"]
    assert beyond == pytest.approx([0.3, math.hypot(0.3, 0.2 * 2.0)], rel=1e-3)
    unmeasured = log_widths(components, FITTED, rule_distance=np.array([0.0, 3.0]))["first"]
    assert unmeasured == pytest.approx([0.3, math.hypot(0.3, 0.1 * 3.0)], rel=1e-3)


def test_a_covariance_of_constants_counts() -> None:
    fitted = FittedModel((A, B, FIXED), 0.1, ((0.09, -0.12), (-0.12, 0.16)), interval_spread=0.0)
    total = log_widths(components, fitted)[TOTAL]
    assert total[0] == pytest.approx(abs(0.25 * 0.3 - 0.75 * 0.4), rel=1e-2)


def test_independent_widths_add_by_squares() -> None:
    assert total_width(0.3, 0.4, 0.0, 9.0) == pytest.approx(0.5)
    assert total_width(0.0, 0.3, 0.2, 2.0) == pytest.approx(0.5)


def test_eighty_percent_of_a_normal_distribution() -> None:
    estimate = Estimate.from_log_width(10.0, 0.5)
    assert math.log(estimate.high / 10) == pytest.approx(1.2816 * 0.5) == math.log(10 / estimate.low)
    covered = math.erf(math.log(estimate.high / 10) / 0.5 / math.sqrt(2))
    assert covered == pytest.approx(0.8, abs=1e-4)
