"""Tests of how often the runs of a page are looked at."""

from __future__ import annotations

import pytest

from fugaku_gpt.report.page_runs import seconds_between_looks


def test_few_runs_are_looked_at_each_second_and_many_seldom() -> None:
    assert seconds_between_looks(0) == seconds_between_looks(1) == seconds_between_looks(10) == 1.0
    assert 1.0 < seconds_between_looks(200) < 60.0
    assert seconds_between_looks(2000) == pytest.approx(10 * seconds_between_looks(200))
