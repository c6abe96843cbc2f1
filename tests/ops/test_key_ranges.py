"""Tests of the ranges of keys that queries see."""

from __future__ import annotations

from typing import List

import pytest
import torch

from fugaku_gpt.ops import KeyRanges


def seen(ranges: KeyRanges, sample: int = 0) -> List[str]:
    """For each query, an x for each key that it sees."""
    return [
        "".join("x" if first <= key < end else "." for key in range(ranges.keys))
        for first, end in zip(ranges.first[sample].tolist(), ranges.end[sample].tolist())
    ]


def test_causal_queries_see_the_keys_up_to_their_own() -> None:
    assert seen(KeyRanges.causal(3)) == ["x..", "xx.", "xxx"]
    assert seen(KeyRanges.causal(2, 4)) == ["xxx.", "xxxx"]
    assert KeyRanges.causal(3) is KeyRanges.causal(3)


def test_tokens_before_the_padding_see_each_other() -> None:
    ranges = KeyRanges.bidirectional([2, 0, 3], 3)
    assert seen(ranges, 0) == ["xx.", "xx.", "..."]
    assert seen(ranges, 1) == ["..."] * 3 and seen(ranges, 2) == ["xxx"] * 3


def test_tokens_see_their_own_document() -> None:
    ranges = KeyRanges.documents([[0, 2, 3], [0]], 4)
    assert seen(ranges, 0) == ["x...", "xx..", "..x.", "...x"]
    assert seen(ranges, 1) == seen(KeyRanges.causal(4))
    ranges = KeyRanges.documents([[0, 2, 3], [0]], 4, is_causal=False)
    assert seen(ranges, 0) == ["xx..", "xx..", "..x.", "...x"] and seen(ranges, 1) == ["xxxx"] * 4


@pytest.mark.parametrize(
    ("first", "end", "message"),
    [
        ([0, 0], [1, 3], r"does not lie within \[0, 2\]"),
        ([-1, 0], [1, 2], "does not lie within"),
        ([0, 2], [1, 1], "does not lie within"),
        ([1, 0], [1, 2], "before that of the query before it"),
        ([0, 0], [2, 1], "before that of the query before it"),
    ],
)
def test_ranges_that_the_kernels_could_not_use_are_refused(first: List[int], end: List[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyRanges(torch.tensor([first], dtype=torch.int32), torch.tensor([end], dtype=torch.int32), 2)


def test_ranges_of_another_type_or_shape_are_refused() -> None:
    good = torch.zeros(1, 2, dtype=torch.int32)
    for first, end in ((good.long(), good), (good, good[:, :1]), (good[0], good[0]), (good.expand(2, 2), good)):
        with pytest.raises(ValueError, match="contiguous int32 tensors"):
            KeyRanges(first, end, 2)


def test_ranges_suit_one_number_of_samples_or_all_if_they_are_shared() -> None:
    assert KeyRanges.causal(3).suits(7, 3, 3) and not KeyRanges.causal(3).suits(7, 3, 4)
    assert KeyRanges.bidirectional([1, 2], 3).suits(2, 3, 3) and not KeyRanges.bidirectional([1, 2], 3).suits(3, 3, 3)
