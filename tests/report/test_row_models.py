"""Tests of the shape of a model that a row and the texts above it state."""

from __future__ import annotations

import pytest

from fugaku_gpt.report.figures import Interval
from fugaku_gpt.report.row_models import parameters_of_label, parameters_of_shape


@pytest.mark.parametrize(
    ("label", "low", "high"),
    [("13B", 12.5e9, 13.5e9), ("1.3b", 1.25e9, 1.35e9), ("124 M", 123.5e6, 124.5e6), ("1T", 0.5e12, 1.5e12),
     ("0.25B", 0.245e9, 0.255e9)],
)  # fmt: skip
def test_a_label_stands_for_all_counts_that_round_to_it(label: str, low: float, high: float) -> None:
    interval = parameters_of_label(label)
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("label", ["", "B", "13", "x B", "1.2.3B", "13K"])
def test_another_text_is_no_number_of_parameters(label: str) -> None:
    assert parameters_of_label(label) is None


def test_a_shape_has_the_matrices_at_least_and_all_tables_at_most() -> None:
    least, most = parameters_of_shape(3, 2)
    assert least == 12 * 3 * 4
    tables = parameters_of_shape(0, 2)[1]
    assert most == least + 13 * 3 * 2 + tables and tables > 2 * 50257
    # GPT-2's 124,439,808 parameters lie between
    low, high = parameters_of_shape(12, 768)
    assert Interval(low, high).overlaps(Interval(124_439_808, 124_439_808))
