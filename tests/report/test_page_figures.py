"""Tests of the curves of a run as the page of runs shows them."""

from __future__ import annotations

from fugaku_gpt.report.page_figures import curves_of
from fugaku_gpt.report.run_series import RunSeries


def test_an_update_has_the_new_points_and_a_page_has_all() -> None:
    series = RunSeries()
    series.add({"kind": "iteration", "iteration": 1, "loss": 4.0})
    series.mark()
    assert curves_of(series, is_update=True) == {}
    series.add({"kind": "iteration", "iteration": 2, "loss": 3.0})
    assert curves_of(series)["loss"].at.tolist() == [1.0, 2.0]
    assert curves_of(series, is_update=True)["loss"].at.tolist() == [2.0]
