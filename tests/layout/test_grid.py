"""Tests of groups of ranks in every order of the axes."""

from __future__ import annotations

from dataclasses import replace
from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.layout.grid import (
    ORDERS,
    Coordinates,
    coordinates_of,
    dp_group,
    embedding_group,
    evenly_spaced,
    kv_group,
    pp_group,
    rank_of,
    tp_group,
)

layouts = st.builds(LayoutConfig, dp=st.integers(1, 5), tp=st.integers(1, 5), pp=st.integers(1, 5))
orders = st.sampled_from(ORDERS)


@given(layouts, orders)
def test_ranks_map_to_distinct_coordinates_in_every_order(layout: LayoutConfig, order: str) -> None:
    coordinates_of_ranks = [coordinates_of(rank, layout, order) for rank in range(layout.ranks)]
    assert len(set(coordinates_of_ranks)) == layout.ranks
    assert [rank_of(coordinates, layout, order) for coordinates in coordinates_of_ranks] == list(range(layout.ranks))


@pytest.mark.slow
@given(layouts, orders)
def test_ranks_along_the_fastest_axis_are_consecutive(layout: LayoutConfig, order: str) -> None:
    fastest = order.split(",")[0]
    group = {"tp": tp_group, "pp": pp_group, "dp": dp_group}[fastest]
    for rank in range(layout.ranks):
        ranks = group(coordinates_of(rank, layout, order), layout, order)
        assert ranks == range(ranks[0], ranks[0] + getattr(layout, fastest))


@pytest.mark.slow
@given(layouts, orders)
def test_groups_partition_the_ranks_in_order_of_their_coordinates(layout: LayoutConfig, order: str) -> None:
    for axis, group_of in (("tp", tp_group), ("pp", pp_group), ("dp", dp_group)):
        groups = set()
        for rank in range(layout.ranks):
            coordinates = coordinates_of(rank, layout, order)
            group = group_of(coordinates, layout, order)
            assert group[getattr(coordinates, axis)] == rank
            groups.add(tuple(group))
        assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))


@pytest.mark.slow
@given(layouts, orders)
def test_the_embedding_is_shared_by_the_ends_of_each_pipeline(layout: LayoutConfig, order: str) -> None:
    for rank in range(layout.ranks):
        coordinates = coordinates_of(rank, layout, order)
        group = embedding_group(coordinates, layout, order)
        assert rank in group
        if layout.pp > 1 and coordinates.pp in (0, layout.pp - 1):
            assert list(group) == [
                rank_of(Coordinates(coordinates.dp, stage, coordinates.tp), layout, order)
                for stage in (0, layout.pp - 1)
            ]
        else:
            assert list(group) == [rank]


@pytest.mark.slow
@given(layouts, orders, st.integers(1, 4))
def test_copies_of_a_head_are_on_neighbours_along_tp(layout: LayoutConfig, order: str, copies: int) -> None:
    layout = replace(layout, tp=layout.tp * copies)
    for rank in range(layout.ranks):
        coordinates = coordinates_of(rank, layout, order)
        group = kv_group(coordinates, layout, order, copies)
        head = coordinates.tp // copies
        assert list(group) == [
            rank_of(replace(coordinates, tp=head * copies + i), layout, order) for i in range(copies)
        ]


def test_the_usual_order_is_tp_then_pp_then_dp() -> None:
    layout = LayoutConfig(dp=2, tp=3, pp=4)
    assert coordinates_of(23, layout) == Coordinates(dp=1, pp=3, tp=2)
    assert list(pp_group(coordinates_of(1, layout), layout)) == [1, 4, 7, 10]
    assert list(dp_group(coordinates_of(1, layout), layout)) == [1, 13]
    assert coordinates_of(1, layout, "dp,tp,pp") == Coordinates(dp=1, pp=0, tp=0)


def test_an_invalid_order_is_refused() -> None:
    with pytest.raises(ValueError, match="valid: tp,pp,dp; "):
        coordinates_of(0, LayoutConfig(), "tp,pp")


@given(st.lists(st.integers(0, 40), max_size=6))
def test_evenly_spaced_ranks_are_a_range_and_all_are_kept_in_order(ranks: List[int]) -> None:
    for order in (ranks, sorted(ranks)):
        compact = evenly_spaced(order)
        assert list(compact) == order
        steps = {after - before for before, after in zip(order, order[1:])}
        assert list(evenly_spaced(np.asarray(order, int))) == order  # type: ignore[arg-type]
        assert isinstance(compact, range) == (bool(order) and len(steps) <= 1 and min(steps, default=1) > 0)
