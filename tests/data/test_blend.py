"""Tests of blending by weight: every sample of every corpus occurs once, in the requested shares at every moment."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.data.blend import Blend

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(WEIGHTS)
def test_shares_hold_at_every_moment(weights: List[float]) -> None:
    blend = Blend(weights)
    seen = [0] * len(weights)
    for number in range(400):
        corpus, own = blend.locate(number)
        assert own == seen[corpus], "each corpus gives its samples in turn"
        seen[corpus] += 1
        for count, weight in zip(seen, weights):
            assert abs(count - (number + 1) * weight / sum(weights)) < len(weights)


@pytest.mark.slow
@given(WEIGHTS, st.integers(0, 10**15))
def test_any_number_is_located_at_once(weights: List[float], number: int) -> None:
    corpus, own = Blend(weights).locate(number)
    assert own == pytest.approx(number * weights[corpus] / sum(weights), abs=len(weights), rel=1e-12)


def test_two_corpora_deviate_by_at_most_a_sample() -> None:
    blend = Blend([0.7, 0.3])
    firsts = 0
    for number in range(1000):
        firsts += blend.locate(number)[0] == 0
        assert abs(firsts - 0.7 * (number + 1)) < 1.001


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 200))
def test_counts_are_those_of_the_located_samples(weights: List[float], samples: int) -> None:
    blend = Blend(weights)
    corpora = [blend.locate(number)[0] for number in range(samples)]
    assert blend.counts(samples) == [corpora.count(corpus) for corpus in range(len(weights))]
