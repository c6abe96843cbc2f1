"""Tests of thinning curves: few points remain, and with them every peak and the ends."""

from __future__ import annotations

import itertools
import math
from typing import Iterator, List

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.report.page_figures import Curve
from fugaku_gpt.report.thinning import gap_starts, thin

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


@given(st.lists(VALUES, max_size=100), st.integers(0, 20))
def test_the_longest_stretches_that_are_not_finite_are_kept(points: List[float], most: int) -> None:
    stretches = [(number, len(list(group))) for number, group in _stretches(points)]
    starts = gap_starts(np.array(points, dtype=float), most).tolist()
    assert starts == sorted(starts) and len(starts) == min(most, len(stretches))
    lengths = sorted((length for _, length in stretches), reverse=True)[:most]
    assert sorted((dict(stretches)[start] for start in starts), reverse=True) == lengths


def _stretches(points: List[float]) -> "Iterator[tuple[int, List[float]]]":
    number = 0
    for is_finite, group in itertools.groupby(points, math.isfinite):
        members = list(group)
        if not is_finite:
            yield number, members
        number += len(members)


def test_a_thinned_curve_has_a_gap_where_a_loss_was_not_finite() -> None:
    """A line was drawn straight over the iterations of a run that had diverged."""
    values = np.full(5000, 2.0)
    values[1000:1500] = math.nan
    curve = Curve(np.arange(5000, dtype=float), values, None, 6, math.inf).thinned(400)
    (gap,) = np.flatnonzero(~np.isfinite(curve.values))
    assert len(curve.at) <= 400 and curve.at[gap] == 1000 and (np.diff(curve.at) > 0).all()


def test_the_fewest_points_are_the_ends_the_lowest_and_the_highest() -> None:
    at, values = np.arange(100.0), np.full(100, 2.0)
    values[30], values[20] = 9.0, -9.0
    for most in (4, 5):
        assert thin(at, values, most).tolist() == [0, 20, 30, 99]
