"""Maps ranks to coordinates (dp, pp, tp) and back, and lists the groups of ranks that communicate.

The order of the axes says which ranks are neighbours. Usual is ``tp,pp,dp``: tensor-parallel ranks are neighbours,
pipeline stages come next, replicas are farthest apart.

A group is the sequence of its ranks in order. Ranks that share a group see the same sequence, so one ``MPI_Comm_split``
of the world with the first rank as colour and the position in the sequence as key makes all groups of a kind. Ranks
along an axis are evenly spaced, so that a group is a ``range``, however many ranks are in it: it takes no memory, and
two of them are compared in constant time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Mapping, Sequence

from fugaku_gpt.config.schema import GRID_ORDERS, LayoutConfig

TP_PP_DP = "tp,pp,dp"
ORDERS = GRID_ORDERS


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits: replica, pipeline stage and tensor-parallel position, each from 0."""

    dp: int
    pp: int
    tp: int


def coordinates_of(rank: int, layout: LayoutConfig, order: str = TP_PP_DP) -> Coordinates:
    """The coordinates of a rank in the grid.

    Args:
        order: the axes, fastest first; one of ``ORDERS``.

    Raises:
        ValueError: the layout has no such rank, or there is no such order.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank {rank} is not in a layout of {layout.ranks} ranks")
    sizes, strides = _sizes(layout), strides_of(layout, order)
    return Coordinates(**{axis: rank // strides[axis] % sizes[axis] for axis in sizes})


def rank_of(coordinates: Coordinates, layout: LayoutConfig, order: str = TP_PP_DP) -> int:
    """The rank at coordinates of the grid; the inverse of :func:`coordinates_of`."""
    strides = strides_of(layout, order)
    return coordinates.dp * strides["dp"] + coordinates.pp * strides["pp"] + coordinates.tp * strides["tp"]


def tp_group(coordinates: Coordinates, layout: LayoutConfig, order: str = TP_PP_DP) -> range:
    """The ranks that share each layer with this one, in order."""
    return _along("tp", coordinates.tp, coordinates, layout, order)


def pp_group(coordinates: Coordinates, layout: LayoutConfig, order: str = TP_PP_DP) -> range:
    """The ranks that hold the other stages of this one's model, by stage."""
    return _along("pp", coordinates.pp, coordinates, layout, order)


def dp_group(coordinates: Coordinates, layout: LayoutConfig, order: str = TP_PP_DP) -> range:
    """The ranks that hold the same weights as this one, in order."""
    return _along("dp", coordinates.dp, coordinates, layout, order)


def kv_group(coordinates: Coordinates, layout: LayoutConfig, order: str = TP_PP_DP, copies: int = 1) -> range:
    """The ``copies`` neighbouring tensor-parallel ranks that hold the same head of keys and values, in order."""
    first = coordinates.tp // copies * copies
    return tp_group(coordinates, layout, order)[first : first + copies]


def embedding_group(coordinates: Coordinates, layout: LayoutConfig, order: str = TP_PP_DP) -> range:
    """The ranks that hold the same slice of the tied embedding in one replica: of the first and of the last stage.

    A rank of a stage between, or of the only stage, is alone in its group.
    """
    stages = pp_group(coordinates, layout, order)
    if layout.pp > 1 and coordinates.pp in (0, layout.pp - 1):
        return stages[:: layout.pp - 1]
    return stages[coordinates.pp : coordinates.pp + 1]


def evenly_spaced(ranks: Sequence[int]) -> Sequence[int]:
    """The same ranks as a ``range`` if they are evenly spaced and ascend, otherwise as a tuple."""
    if isinstance(ranks, range):
        return ranks
    if len(ranks) == 1:
        return range(ranks[0], ranks[0] + 1)
    if len(ranks) > 1 and ranks[1] > ranks[0]:
        spaced = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(spaced) == tuple(ranks):
            return spaced
    return tuple(ranks)


def strides_of(layout: LayoutConfig, order: str) -> Mapping[str, int]:
    """The distance between the ranks of neighbours along each axis.

    Raises:
        ValueError: there is no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"grid order {order!r}: valid: {'; '.join(ORDERS)} (fastest axis first)")
    return _strides(order, layout.dp, layout.pp, layout.tp)


@lru_cache(maxsize=64)  # each of ten thousand ranks is asked for several times
def _strides(order: str, dp: int, pp: int, tp: int) -> Mapping[str, int]:
    sizes, strides, step = {"dp": dp, "pp": pp, "tp": tp}, {}, 1
    for axis in order.split(","):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def _sizes(layout: LayoutConfig) -> Dict[str, int]:
    return {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}


def _along(axis: str, position: int, coordinates: Coordinates, layout: LayoutConfig, order: str) -> range:
    stride = strides_of(layout, order)[axis]
    first = rank_of(coordinates, layout, order) - position * stride
    return range(first, first + stride * _sizes(layout)[axis], stride)
