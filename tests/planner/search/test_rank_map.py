"""Tests of node boxes in the torus and of rank maps: every rank has a node, and groups and stages are close."""

from __future__ import annotations

from typing import Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.layout.grid import Coordinates, rank_of
from fugaku_gpt.planner.search.rank_map import choose_node_box, choose_rank_map

SIZES = [1, 2, 4, 6, 12, 16, 24, 48, 64, 96, 384, 512, 576, 1536]


@st.composite
def layouts(draw: st.DrawFn) -> Tuple[int, int, LayoutConfig]:
    """(nodes, ranks per node, layout) with tensor-parallel groups that fit into a node or fill nodes."""
    nodes = draw(st.sampled_from(SIZES))
    ranks_per_node = draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([size for size in (1, 2, 4, 8, 12) if nodes * ranks_per_node % size == 0]))
    groups = nodes * ranks_per_node // tp
    pp = draw(st.sampled_from([stages for stages in range(1, 25) if groups % stages == 0]))
    return nodes, ranks_per_node, LayoutConfig(dp=groups // pp, tp=tp, pp=pp)


def _hops(start: Tuple[int, int, int], end: Tuple[int, int, int]) -> int:
    return sum(abs(left - right) for left, right in zip(start, end))


@pytest.mark.slow
@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_node_is_filled_once_groups_lie_in_nodes_and_stages_side_by_side(
    drawn: Tuple[int, int, LayoutConfig],
) -> None:
    nodes, ranks_per_node, layout = drawn
    torus = choose_node_box(nodes)
    assert torus is not None
    rank_map = choose_rank_map(torus, layout, ranks_per_node)
    rank_nodes = [rank_map.node_of(rank) for rank in range(layout.ranks)]
    assert sorted(rank_nodes) == sorted(tuple(cell) for cell in np.ndindex(*torus.sides) for _ in range(ranks_per_node))
    longest_hop = 0
    for dp, pp in np.ndindex(layout.dp, layout.pp):
        group = [rank_nodes[rank_of(Coordinates(int(dp), int(pp), tp), layout)] for tp in range(layout.tp)]
        if ranks_per_node % layout.tp == 0:
            assert rank_map.groups_within_nodes and len(set(group)) == 1
        if pp + 1 < layout.pp:
            next_group = [rank_nodes[rank_of(Coordinates(int(dp), int(pp) + 1, tp), layout)] for tp in range(layout.tp)]
            longest_hop = max([longest_hop, *(_hops(start, end) for start, end in zip(group, next_group))])
    assert longest_hop == rank_map.stage_hops
    if ranks_per_node % layout.tp == 0:  # so adjacent stages are always on adjacent nodes
        assert longest_hop <= 1


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "tp", "pp"),
    [(13824, 1, 6, 8), (13824, 2, 12, 8), (13824, 1, 36, 8), (512, 1, 4, 4), (512, 2, 8, 2)],
)
def test_groups_of_several_nodes_leave_stages_side_by_side_too(
    nodes: int, ranks_per_node: int, tp: int, pp: int
) -> None:
    torus = choose_node_box(nodes)
    assert torus is not None
    rank_map = choose_rank_map(torus, LayoutConfig(dp=nodes * ranks_per_node // tp // pp, tp=tp, pp=pp), ranks_per_node)
    assert not rank_map.groups_within_nodes and rank_map.stage_hops == 1
    assert rank_map.group_hops < tp // ranks_per_node


def test_the_box_has_the_fewest_allocated_nodes() -> None:
    large, odd, small, single = choose_node_box(13824), choose_node_box(512), choose_node_box(16), choose_node_box(1)
    assert large and (large.shape, large.allocation, large.allocated) == ("24x24x24", "torus", 13824)
    assert odd and odd.allocated == 528 and odd.allocation == "torus"  # 11 shelves of 48
    assert small and (small.allocation, small.allocated) == ("mesh", 16)  # a torus would take 24
    assert single and single.shape == "1x1x1"
    requested = choose_node_box(512, "8x8x8")
    assert requested and (requested.shape, requested.allocated) == ("8x8x8", 576)  # 8x9x8
    assert choose_node_box(383) is None  # a prime: longer than any side of the machine


def test_the_file_has_a_line_of_coordinates_for_each_rank() -> None:
    torus = choose_node_box(12)
    assert torus is not None
    text = choose_rank_map(torus, LayoutConfig(dp=2, tp=4, pp=6), 4).hostfile_text().splitlines()
    assert text[0].startswith("# node of each rank in 2x2x3; tensor-parallel groups inside a node; stages at most 1")
    assert len(text) == 1 + 48 and text[1:5] == [text[1]] * 4 and text[1] == "(0,0,0)"
