"""Leaves out points of a curve that a picture of a given width cannot show."""

from __future__ import annotations

import numpy as np


def thin(at: "np.ndarray", values: "np.ndarray", most: int) -> "np.ndarray":
    """Return the numbers of the points that remain: in each of ``most // 2 - 1`` columns of equal width the lowest and
    the highest value, and the first and the last point, so that no peak is lost and the curve keeps its ends.

    Args:
        at: positions, shape [points], in any order.
        values: shape [points]; points without a finite value are left out.
        most: number of points that may remain, 4 at least; if there are no more, and all are finite, all remain.

    Returns:
        The numbers, int64, in the order of the positions.
    """
    order: "np.ndarray" = np.argsort(at, kind="stable")
    order = order[np.isfinite(values[order]) & np.isfinite(at[order])]
    if len(order) <= most:
        return order
    positions, heights = at[order], values[order]
    columns = max(1, most // 2 - 1)
    width = (positions[-1] - positions[0]) / columns or 1.0
    column = np.minimum((positions - positions[0]) // width, columns - 1)
    by_height = np.lexsort((heights, column))
    starts = np.flatnonzero(np.diff(column, prepend=-1.0))
    lowest, highest = by_height[starts], by_height[np.append(starts[1:], len(order)) - 1]
    remaining = np.unique(np.concatenate(([0], lowest, highest, [len(order) - 1])))
    return np.asarray(order[remaining])


def gap_starts(values: "np.ndarray", most: int) -> "np.ndarray":
    """Return the number of the first point of each stretch of values that are not finite, in order; of more than
    ``most`` stretches those of the longest.

    Args:
        values: shape [points], in the order of their positions.
    """
    edges = np.diff(np.concatenate(([0], ~np.isfinite(values), [0])).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    longest = np.argsort(starts - ends, kind="stable")[:most]
    return np.asarray(np.sort(starts[longest]))
