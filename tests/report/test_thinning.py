"""Tests of thinning curves: few points remain, and with them every peak and the ends."""

from __future__ import annotations

import math
from typing import List

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.report.thinning import thin

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf))


@given(st.lists(st.tuples(st.integers(0, 10**6), VALUES), max_size=300), st.integers(4, 60))
def test_each_piece_keeps_the_lowest_and_highest_value(points: List["tuple[int, float]"], most: int) -> None:
    at, values = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    rows = thin(at, values, most)
    finite = np.flatnonzero(np.isfinite(values))
    assert len(set(rows.tolist())) == len(rows) <= max(most, 0)
    assert set(rows.tolist()) <= set(finite.tolist())
    assert (np.diff(at[rows]) >= 0).all()
    if len(finite) <= most:
        assert sorted(rows.tolist()) == finite.tolist()
        return
    first, last = at[finite].min(), at[finite].max()
    pieces = max(1, most // 2 - 1)
    width = (last - first) / pieces or 1.0
    piece_of = np.minimum((at - first) // width, pieces - 1)
    for piece in set(piece_of[finite].tolist()):
        members = finite[piece_of[finite] == piece]
        remaining = [row for row in rows if piece_of[row] == piece]
        assert min(values[remaining]) == min(values[members]) and max(values[remaining]) == max(values[members])
    assert at[rows[0]] == first and at[rows[-1]] == last


def test_a_single_spike_among_a_million_points_remains() -> None:
    values = np.full(10**6, 2.0)
    values[654321] = 9.0
    rows = thin(np.arange(10**6, dtype=float), values, 500)
    assert len(rows) <= 500 and 654321 in rows
