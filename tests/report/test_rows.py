"""Tests of the row that repeats of a configuration become."""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

import pytest

from fugaku_gpt.report.rows import merge_repeats
from tests.report.test_notes_table import by_hand, measurements

ROW = by_hand(measurements()["fsweep.t1.L6"])


@pytest.mark.parametrize(
    "good, bad, remarks",
    [(1, 0, ()), (2, 0, ("n=2",)), (1, 1, ("1 of 2 did not end well",)), (2, 3, ("n=2", "3 of 5 did not end well")),
     (0, 2, ())],
)  # fmt: skip
def test_remarks_count_the_repeats_and_those_that_did_not_end_well(
    good: int, bad: int, remarks: Tuple[str, ...]
) -> None:
    rows = [replace(ROW, status="ok", remarks=())] * good + [replace(ROW, status="failed", remarks=())] * bad
    assert merge_repeats(rows).remarks == remarks
    assert merge_repeats(rows[::-1]).remarks == remarks
