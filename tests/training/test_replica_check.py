"""Tests of whom a difference between checksums accuses; ``tests/mpi/test_replica_check.py`` flips bits."""

from __future__ import annotations

from typing import Dict, List, Tuple

import pytest

from fugaku_gpt.training.replica_check import Difference, suspects_of


@pytest.mark.parametrize(
    ("groups", "suspects", "others"),
    [
        ([{1: (0, 1, 3), 2: (2,)}], [2], [0, 1, 3]),  # a majority
        ([{1: (0, 1, 4), 2: (2,), 3: (3,)}], [2, 3], [0, 1, 4]),  # two ranks, with bits of their own
        ([{1: (0,), 2: (1,)}], [0, 1], []),  # one against one
        ([{1: (0, 1), 2: (2, 3)}], [0, 1, 2, 3], []),
        ([{1: (0,), 2: (2,)}, {1: (0,), 2: (1,)}], [0], [1, 2]),  # in both pairs that differ
        ([{1: (0,), 2: (2,)}, {1: (1,), 2: (3,)}], [0, 1, 2, 3], []),  # two pairs without a rank in common
        ([{1: (0, 2, 4), 2: (6,)}, {1: (7,), 2: (6,)}], [6], [0, 2, 4]),
    ],
)
def test_a_majority_or_a_rank_common_to_all_differences_tells_who_is_wrong(
    groups: List[Dict[int, Tuple[int, ...]]], suspects: List[int], others: List[int]
) -> None:
    assert suspects_of([Difference("x", ranks) for ranks in groups]) == (suspects, others)
