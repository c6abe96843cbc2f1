"""Tests of flat ranges of slices as rectangles of the full tensor."""

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
    """Draws the shape of a tensor and a region of it."""
    shape = draw(shapes)
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return shape, Region(start, tuple(draw(st.integers(1, size - first)) for size, first in zip(shape, start)))


@st.composite
def partitions(draw: st.DrawFn) -> Tuple[Tuple[int, ...], List[Region]]:
    """Draws a tensor cut along one dimension by tensor parallelism, and each slice's flat memory cut anywhere."""
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    ways = draw(st.sampled_from([n for n in range(1, 6) if shape[dim] % n == 0])) if shape else 1
    regions: List[Region] = []
    for way in range(ways):
        start = tuple(way * size // ways if axis == dim else 0 for axis, size in enumerate(shape))
        slice_shape = tuple(size // ways if axis == dim else size for axis, size in enumerate(shape))
        size = math.prod(slice_shape)
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        for first, stop in zip(ends, ends[1:]):
            regions += rectangles(start, slice_shape, first, stop)
    return shape, regions


@pytest.mark.slow
@given(slices(), st.data())
def test_rectangles_make_up_a_flat_range_in_order(cut: Tuple[Tuple[int, ...], Region], data: st.DataObject) -> None:
    shape, region = cut
    tensor = np.arange(math.prod(shape)).reshape(shape)
    local = tensor[region.within(full_region(shape))].reshape(-1)
    first = data.draw(st.integers(0, region.size))
    stop = data.draw(st.integers(first, region.size))
    pieces = rectangles(region.start, region.shape, first, stop)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    seen = [tensor[piece.within(full_region(shape))].reshape(-1) for piece in pieces]
    assert np.concatenate([*seen, np.empty(0, int)]).tolist() == local[first:stop].tolist()


@pytest.mark.slow
@given(partitions())
def test_the_rectangles_of_all_ranks_make_up_the_tensor_once(cut: Tuple[Tuple[int, ...], List[Region]]) -> None:
    shape, regions = cut
    times = np.zeros(shape, int)
    for region in regions:
        times[region.within(full_region(shape))] += 1
    assert (times == 1).all() and tiles(regions, shape)


@pytest.mark.slow
@given(partitions(), st.data())
def test_tiles_agrees_with_counting(cut: Tuple[Tuple[int, ...], List[Region]], data: st.DataObject) -> None:
    shape, regions = cut
    drawn = data.draw(st.lists(st.sampled_from(regions), max_size=len(regions) + 1))
    times = np.zeros(shape, int)
    for region in drawn:
        times[region.within(full_region(shape))] += 1
    assert tiles(drawn, shape) == bool((times == 1).all())


@pytest.mark.slow
@given(slices(), st.data())
def test_an_intersection_holds_the_elements_of_both_regions(
    cut: Tuple[Tuple[int, ...], Region], data: st.DataObject
) -> None:
    shape, first = cut
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    second = Region(start, tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, start)))
    both = np.zeros(shape, int)
    for region in (first, second):
        both[region.within(full_region(shape))] += 1
    shared = intersection(first, second)
    assert shared == intersection(second, first)
    expected = np.zeros(shape, bool)
    if shared is not None:
        expected[shared.within(full_region(shape))] = True
    assert ((both == 2) == expected).all()


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_of_the_slice_is_refused(first: int, stop: int) -> None:
    with pytest.raises(ValueError, match="slice of 6 elements"):
        rectangles((0, 0), (2, 3), first, stop)
