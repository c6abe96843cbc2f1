"""Tests that permutations are bijections, and the same in every version."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.data.permutation import permutation, permuted_index, stream_key

PERMUTATION = [6, 3, 0, 4, 7, 1, 2, 5]
PERMUTED = [6, 4, 3, 7, 1, 2, 0, 5]
FAR = 300480210951


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**128 - 1), st.integers(1, 300))
def test_both_forms_are_bijections(key: int, size: int) -> None:
    assert sorted(permuted_index(key, size, index) for index in range(size)) == list(range(size))
    assert sorted(permutation(key, size).tolist()) == list(range(size))


def test_permutations_are_the_same_on_every_numpy() -> None:
    key = stream_key(1234, "train", 0)
    assert permutation(key, 8).tolist() == PERMUTATION
    assert [permuted_index(key, 8, index) for index in range(8)] == PERMUTED
    assert permuted_index(key, 10**12, 5) == FAR


def test_permutations_mix_well() -> None:
    """Neighbours land far from one another, and each position is as likely as any other (chi-square, 99.9 %)."""
    size = 4096
    images = np.array([permuted_index(7, size, index) for index in range(size)])
    steps = np.abs(np.diff(images))
    assert abs(steps.mean() - size / 3) < size * 0.02
    first = np.array([permuted_index(key, 16, 0) for key in range(3200)])
    counts = np.bincount(first, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 37.7
