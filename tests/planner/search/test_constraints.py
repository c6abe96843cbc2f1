"""Tests of the global batches and conditions that a search of layouts is given."""

from __future__ import annotations

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.search.constraints import batches_of, parsed


def test_batches_are_numbers_and_ranges_or_the_run_s() -> None:
    assert batches_of([], 64, []) == (64,)
    assert batches_of(["8", "6-8", "1000000000"], 64, []) == (8, 6, 7, 1000000000)
    assert len(batches_of(["1-4096"], 64, [])) == 4096
    for text, problem in (
        ("1-4097", "over at most 4096"),
        ("0", "go up from 1 or more"),
        ("8-7", "go up from 1 or more"),
        ("1000000001", "must be at most 1000000000"),
        ("8-x", "must be a number"),
    ):
        with pytest.raises(UsageError, match=problem):
            batches_of([text], 64, [])


def test_conditions_on_batches_alone_choose_among_them() -> None:
    rules = parsed(["GBS % 3 == 0", "GBS % TP == 0"])
    assert batches_of(["5-9"], 64, rules) == (6, 9)
    with pytest.raises(UsageError, match="GBS % 3 == 0: no global batch of 7 to 8 meets it"):
        batches_of(["7-8"], 64, rules)
