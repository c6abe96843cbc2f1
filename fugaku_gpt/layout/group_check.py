"""Computes every rank's own view of its groups from its number, and proves that all members of a group agree."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, List, Mapping, Sequence

from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.layout.communications import CommunicationPlan
from fugaku_gpt.layout.grid import (
    Coordinates,
    dp_group,
    embedding_group,
    evenly_spaced,
    kv_group,
    pp_group,
    tp_group,
)
from fugaku_gpt.layout.nodes import ACROSS_NODES, ACROSS_NODES_GATHER, NODE, NODE_GATHER, node_groups

GroupOf = Callable[[Coordinates, LayoutConfig, str], Sequence[int]]
GROUPS: Mapping[str, GroupOf] = {"tp": tp_group, "pp": pp_group, "dp": dp_group, "embedding": embedding_group}
REPLICA_COMMUNICATORS = (
    "dp",
    NODE,
    ACROSS_NODES,
    NODE_GATHER,
    ACROSS_NODES_GATHER,
)  # their members are replicas of each other


class GridError(ValueError):
    """A grid of ranks that does not fit together.

    Attributes:
        rank: a rank that shows the problem.
        communicator: the communicator on which it does.
        position: position of the first difference in the rank's operations on this communicator; for a deadlock, in all
            of the rank's communications; -1 if the group itself is wrong.
    """

    def __init__(self, rank: int, communicator: str, position: int, problem: str) -> None:
        at = f", position {position}" if position >= 0 else ""
        super().__init__(f"rank {rank}, communicator {communicator}{at}: {problem}")
        self.rank = rank
        self.communicator = communicator
        self.position = position


def groups_of(plan: CommunicationPlan) -> Mapping[str, GroupOf]:
    """Maps each kind of communicator except the world to the function by which a rank finds its group."""
    nodes, groups = plan.nodes, dict(GROUPS)
    if plan.kv_copies > 1:
        groups["kv"] = partial(kv_group, copies=plan.kv_copies)
    if not plan.is_hierarchical or nodes is None:
        return groups

    def on_node(coordinates: Coordinates, layout: LayoutConfig, order: str) -> Sequence[int]:
        return node_groups(coordinates, layout, order, nodes)[0]

    def across(coordinates: Coordinates, layout: LayoutConfig, order: str) -> Sequence[int]:
        return node_groups(coordinates, layout, order, nodes)[1]

    return {**groups, NODE: on_node, ACROSS_NODES: across, NODE_GATHER: on_node, ACROSS_NODES_GATHER: across}


def checked_groups(
    coordinates_of_ranks: Sequence[Coordinates],
    plan: CommunicationPlan,
    groups: Mapping[str, GroupOf],
    on_kind: Callable[[], None] = lambda: None,
) -> Dict[str, List[Sequence[int]]]:
    """Lists the group of each rank, by kind of communicator.

    Args:
        on_kind: is called when a kind is done.

    Raises:
        GridError: members of a group do not agree on it, or it is not where it should be.
    """
    members = {}
    for kind, group_of in groups.items():
        members[kind] = _groups(kind, group_of, coordinates_of_ranks, plan)
        on_kind()
    for on_node, across in ((NODE, ACROSS_NODES), (NODE_GATHER, ACROSS_NODES_GATHER)):
        if on_node in members:
            _check_two_steps(on_node, across, members, plan)
    return members


def _groups(
    kind: str, group_of: GroupOf, coordinates_of_ranks: Sequence[Coordinates], plan: CommunicationPlan
) -> List[Sequence[int]]:
    """The group of each rank as the rank itself sees it, after a check that all members agree."""
    views: Dict[Sequence[int], Sequence[int]] = {}  # each group once, however many ranks see it
    claimed: Dict[Sequence[int], List[int]] = {}
    view_of_rank = []
    for rank, coordinates in enumerate(coordinates_of_ranks):
        view = evenly_spaced(group_of(coordinates, plan.layout, plan.order))
        view_of_rank.append(views.setdefault(view, view))
        claimed.setdefault(view, []).append(rank)
    for view, ranks in claimed.items():
        if sorted(view) != ranks:
            suspects = sorted(set(view).symmetric_difference(ranks)) or list(view)
            those = abbreviated(ranks)
            problem = (
                f"its group is {abbreviated(view)}, but ranks {those} see themselves in it; look at rank {suspects[0]}"
            )
            raise GridError(ranks[0], kind, -1, problem)
        _check_positions(kind, view, coordinates_of_ranks, plan)
    return view_of_rank


def _check_positions(
    kind: str, view: Sequence[int], coordinates_of_ranks: Sequence[Coordinates], plan: CommunicationPlan
) -> None:
    """Check that the members of a group are along its axis, in order, and share the other two coordinates."""
    first, last = coordinates_of_ranks[view[0]], plan.layout.pp - 1
    dp, pp, tp = first.dp, first.pp, first.tp
    if kind in (NODE, ACROSS_NODES, NODE_GATHER, ACROSS_NODES_GATHER):
        replicas = sorted(coordinates_of_ranks[rank].dp for rank in view)
        expected = [Coordinates(position, pp, tp) for position in replicas]
    elif kind == "embedding":
        expected = [Coordinates(dp, stage, tp) for stage in ([0, last] if last and pp in (0, last) else [pp])]
    elif kind == "kv":
        lowest = tp // plan.kv_copies * plan.kv_copies
        expected = [Coordinates(dp, pp, position) for position in range(lowest, lowest + plan.kv_copies)]
    elif kind == "dp":
        expected = [Coordinates(position, pp, tp) for position in range(plan.layout.dp)]
    elif kind == "pp":
        expected = [Coordinates(dp, position, tp) for position in range(plan.layout.pp)]
    else:
        expected = [Coordinates(dp, pp, position) for position in range(plan.layout.tp)]
    if [coordinates_of_ranks[rank] for rank in view] != expected:
        range_of_ranks = f"from {expected[0]} to {expected[-1]}, in order"
        problem = f"its group {abbreviated(view)} is not the ranks along {kind} {range_of_ranks}"
        raise GridError(view[0], kind, -1, problem)


def _check_two_steps(
    on_node: str, across: str, members: Mapping[str, List[Sequence[int]]], plan: CommunicationPlan
) -> None:
    """The two steps of a hierarchical sum combine all replicas: each group across nodes has one rank of each node, at
    the same position on every node; or there is a single step for all."""
    assert plan.nodes is not None
    for replicas in dict.fromkeys(members["dp"]):
        if all(len(members[kind][rank]) == 1 for kind in (on_node, across) for rank in replicas):
            continue
        for view in dict.fromkeys(members[on_node][rank] for rank in replicas):
            if len({plan.nodes.node_of(rank) for rank in view}) > 1:
                raise GridError(view[0], on_node, -1, f"its group {abbreviated(view)} is on several nodes")
        for view in dict.fromkeys(members[across][rank] for rank in replicas):
            reached = sorted(other for rank in view for other in members[on_node][rank])
            if reached != sorted(replicas) or len({members[on_node][rank].index(rank) for rank in view}) > 1:
                problem = (
                    f"with its group {abbreviated(view)} it meets {abbreviated(reached)}; "
                    f"its replicas are {abbreviated(replicas)}"
                )
                raise GridError(view[0], across, -1, problem)


def abbreviated(ranks: Sequence[int]) -> str:
    """Names the first of many ranks."""
    return ", ".join(map(str, ranks[:6])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 6 else "")
