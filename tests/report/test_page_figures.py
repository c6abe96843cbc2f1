"""Tests of the curves of a run as the page of runs shows them."""

from __future__ import annotations

import pytest

from fugaku_gpt.report.page_figures import FIGURES, Figure, curves_of
from fugaku_gpt.report.run_series import RunSeries


def test_an_update_has_the_new_points_and_a_page_has_all() -> None:
    series = RunSeries()
    series.add({"kind": "iteration", "iteration": 1, "loss": 4.0})
    series.mark()
    assert curves_of(series, is_update=True) == {}
    series.add({"kind": "iteration", "iteration": 2, "loss": 3.0})
    assert curves_of(series)["loss"].at.tolist() == [1.0, 2.0]
    assert curves_of(series, is_update=True)["loss"].at.tolist() == [2.0]


def test_a_setting_is_the_batch_the_length_or_the_scale_of_losses() -> None:
    assert {figure.key for figure in FIGURES if figure.is_setting} == {"global_batch", "seq_len", "loss_scale"}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_shares_are_drawn_in_percent_and_bytes_in_gibibytes(figure: Figure) -> None:
    series = RunSeries()
    kind = "validation" if figure.is_validation else "iteration"
    series.add({"kind": kind, "iteration": 1, figure.column: 2.0})
    expected = 200.0 if figure.unit.startswith("%") else 2.0 / 2**30 if figure.unit == "GiB" else 2.0
    assert curves_of(series)[figure.key].values.tolist() == [expected]
