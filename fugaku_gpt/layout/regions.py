"""Hyper-rectangles of a logical tensor, and the flat ranges of a rank's slice that they stand for.

A rank holds a slice of a tensor (tensor parallelism) as one run of memory in C order, and often only a range of that
run (ZeRO, or replicas that share the writing of a checkpoint). Seen from the whole tensor, such a range is at most
2 * ndim - 1 rectangles, each again one run of memory; so what a rank holds can be named without naming its layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple


@dataclass(frozen=True)
class Region:
    """Elements [start, start + shape) of a tensor, dimension by dimension. A scalar's region is ``Region((), ())``."""

    start: Tuple[int, ...]
    shape: Tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> Tuple[int, ...]:
        """One past the last element of each dimension."""
        return tuple(first + size for first, size in zip(self.start, self.shape))

    def within(self, outer: "Region") -> Tuple[Any, ...]:
        """The index that cuts this region, as a view, out of an array that holds ``outer``."""
        offsets = ((first - base, size) for first, size, base in zip(self.start, self.shape, outer.start))
        return (..., *(slice(first, first + size) for first, size in offsets))  # without the dots a scalar is copied

    def __str__(self) -> str:
        return "[" + ", ".join(f"{first}:{stop}" for first, stop in zip(self.start, self.stop)) + "]"


def full_region(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def intersection(region: Region, other: Region) -> Optional[Region]:
    """The intersection of two regions of a tensor, or None."""
    start = tuple(map(max, region.start, other.start))
    stop = tuple(map(min, region.stop, other.stop))
    if any(first >= last for first, last in zip(start, stop)):
        return None
    return Region(start, tuple(last - first for first, last in zip(start, stop)))


def tiles(regions: Iterable[Region], shape: Sequence[int]) -> bool:
    """Whether regions cover a tensor completely, and no element twice.

    A region is the product of a step up at its start and a step down at its stop in each dimension; so regions cover
    the tensor exactly once if and only if their corners, with these signs, cancel but for those of the whole tensor.
    """
    corners: Dict[Tuple[int, ...], int] = {}
    for region, multiplicity in chain(((region, 1) for region in regions), ((full_region(shape), -1),)):
        for corner in product(*(((first, 1), (stop, -1)) for first, stop in zip(region.start, region.stop))):
            corner_point = tuple(coordinate for coordinate, _ in corner)
            corners[corner_point] = corners.get(corner_point, 0) + multiplicity * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def rectangles(local_start: Sequence[int], local_shape: Sequence[int], flat_first: int, flat_stop: int) -> List[Region]:
    """Elements [flat_first, flat_stop) of a slice, counted in C order, as regions of the whole tensor.

    Args:
        local_start: where the slice begins in the whole tensor.
        local_shape: of the slice.

    Returns:
        At most 2 * ndim - 1 regions, in order and without gaps: the first begins at element ``flat_first``, and each
        next one where the one before ends. Each is one run of the slice's memory.

    Raises:
        ValueError: the range is not inside the slice.
    """
    if not 0 <= flat_first <= flat_stop <= math.prod(local_shape):
        raise ValueError(f"range {flat_first}:{flat_stop} of a slice of {math.prod(local_shape)} elements")
    if flat_first == flat_stop:
        return []
    return [
        Region(tuple(base + first for base, first in zip(local_start, start)), shape)
        for start, shape in _cut(tuple(local_shape), flat_first, flat_stop)
    ]


def _cut(shape: Tuple[int, ...], first: int, stop: int) -> Iterator[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """(start, shape) of the rectangles of a non-empty range of an array, in order."""
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row, into = divmod(first, inner)
    last_row, tail = divmod(stop, inner)
    if row == last_row:  # inside of one row
        yield from _in_row(row, shape, into, tail)
        return
    if into:
        yield from _in_row(row, shape, into, inner)
        row += 1
    if row < last_row:
        yield (row,) + (0,) * (len(shape) - 1), (last_row - row, *shape[1:])
    if tail:
        yield from _in_row(last_row, shape, 0, tail)


def _in_row(
    row: int, shape: Tuple[int, ...], first: int, stop: int
) -> Iterator[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    for start, part in _cut(shape[1:], first, stop):
        yield (row, *start), (1, *part)
