"""Tests of the messages of the check of groups."""

from __future__ import annotations

from fugaku_gpt.layout.group_check import abbreviated


def test_of_many_ranks_six_are_named_and_the_rest_counted() -> None:
    assert abbreviated(range(6)) == "0, 1, 2, 3, 4, 5"
    assert abbreviated(range(7)) == "0, 1, 2, 3, 4, 5, ... (7 ranks)"
    assert abbreviated([3]) == "3"
