"""Flat ranges of slices as rectangles of the whole tensor."""

from __future__ import annotations

import math
from typing import List, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.layout.regions import Region, full_region, intersection, rectangles, tiles

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def slices(draw: st.DrawFn) -> Tuple[Tuple[int, ...], Region]:
    """(shape of a tensor, a part of it)."""
    shape = draw(shapes)
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return shape, Region(start, tuple(draw(st.integers(1, size - first)) for size, first in zip(shape, start)))


@st.composite
def partitions(draw: st.DrawFn) -> Tuple[Tuple[int, ...], List[Region]]:
    """A tensor cut along one dimension as tensor parallelism cuts it, each slice's run of memory then cut anywhere."""
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    ways = draw(st.sampled_from([n for n in range(1, 6) if shape[dim] % n == 0])) if shape else 1
    found: List[Region] = []
    for way in range(ways):
        start = tuple(way * size // ways if one == dim else 0 for one, size in enumerate(shape))
        part = tuple(size // ways if one == dim else size for one, size in enumerate(shape))
        size = math.prod(part)
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        for first, stop in zip(ends, ends[1:]):
            found += rectangles(start, part, first, stop)
    return shape, found


@given(slices(), st.data())
def test_a_flat_range_is_its_rectangles_in_order(cut: Tuple[Tuple[int, ...], Region], data: st.DataObject) -> None:
    shape, region = cut
    tensor = np.arange(math.prod(shape)).reshape(shape)
    local = tensor[region.within(full_region(shape))].reshape(-1)
    first = data.draw(st.integers(0, region.size))
    stop = data.draw(st.integers(first, region.size))
    found = rectangles(region.start, region.shape, first, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    seen = [tensor[one.within(full_region(shape))].reshape(-1) for one in found]
    assert np.concatenate([*seen, np.empty(0, int)]).tolist() == local[first:stop].tolist()


@given(partitions())
def test_the_rectangles_of_all_ranks_make_up_the_tensor_once(cut: Tuple[Tuple[int, ...], List[Region]]) -> None:
    shape, found = cut
    times = np.zeros(shape, int)
    for region in found:
        times[region.within(full_region(shape))] += 1
    assert (times == 1).all() and tiles(found, shape)


@given(partitions(), st.data())
def test_tiles_is_what_counting_says(cut: Tuple[Tuple[int, ...], List[Region]], data: st.DataObject) -> None:
    shape, found = cut
    some = data.draw(st.lists(st.sampled_from(found), max_size=len(found) + 1))
    times = np.zeros(shape, int)
    for region in some:
        times[region.within(full_region(shape))] += 1
    assert tiles(some, shape) == bool((times == 1).all())


@given(slices(), st.data())
def test_an_intersection_is_what_both_hold(cut: Tuple[Tuple[int, ...], Region], data: st.DataObject) -> None:
    shape, one = cut
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    other = Region(start, tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, start)))
    both = np.zeros(shape, int)
    for region in (one, other):
        both[region.within(full_region(shape))] += 1
    shared = intersection(one, other)
    assert shared == intersection(other, one)
    expected = np.zeros(shape, bool)
    if shared is not None:
        expected[shared.within(full_region(shape))] = True
    assert ((both == 2) == expected).all()


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_of_the_slice_is_refused(first: int, stop: int) -> None:
    with pytest.raises(ValueError, match="slice of 6 elements"):
        rectangles((0, 0), (2, 3), first, stop)
