"""rank ↔ (dp, pp, tp): tensor-parallel ranks are neighbours, pipeline stages come next, replicas are farthest apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

from fugaku_gpt.config.schema import LayoutConfig


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits: replica, pipeline stage and tensor-parallel position, each from 0."""

    dp: int
    pp: int
    tp: int


def coordinates_of(rank: int, layout: LayoutConfig) -> Coordinates:
    """The place of a rank in the grid.

    Raises:
        ValueError: the layout has no such rank.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank {rank} is not in a layout of {layout.ranks} ranks")
    outer, tp = divmod(rank, layout.tp)
    dp, pp = divmod(outer, layout.pp)
    return Coordinates(dp=dp, pp=pp, tp=tp)


def rank_of(place: Coordinates, layout: LayoutConfig) -> int:
    """The rank that sits at a place of the grid; the inverse of :func:`coordinates_of`."""
    return (place.dp * layout.pp + place.pp) * layout.tp + place.tp


def tp_group(place: Coordinates, layout: LayoutConfig) -> List[int]:
    """The ranks that share each layer with this one, in order."""
    return [rank_of(Coordinates(place.dp, place.pp, tp), layout) for tp in range(layout.tp)]


def dp_group(place: Coordinates, layout: LayoutConfig) -> List[int]:
    """The ranks that hold the same weights as this one, in order."""
    return [rank_of(Coordinates(dp, place.pp, place.tp), layout) for dp in range(layout.dp)]
