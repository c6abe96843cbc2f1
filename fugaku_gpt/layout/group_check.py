"""Every rank's own view of its groups, made from its number, and the proof that all members of a group share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.layout.grid import Coordinates, dp_group, embedding_group, pp_group, tp_group
from fugaku_gpt.layout.nodes import ACROSS, ACROSS_GATHER, NODE, NODE_GATHER, node_groups
from fugaku_gpt.layout.sequence import SequencePlan

GroupOf = Callable[[Coordinates, LayoutConfig, str], List[int]]
GROUPS: Mapping[str, GroupOf] = {"tp": tp_group, "pp": pp_group, "dp": dp_group, "embedding": embedding_group}
OF_REPLICAS = ("dp", NODE, ACROSS, NODE_GATHER, ACROSS_GATHER)  # their members are replicas of each other


class GridError(ValueError):
    """A grid of ranks that does not fit together.

    Attributes:
        rank: one that shows it.
        communicator: where.
        position: of the first thing that differs: in the rank's operations on this communicator; for a deadlock, in all
            of the rank's communications; -1 where it is the group itself.
    """

    def __init__(self, rank: int, communicator: str, position: int, words: str) -> None:
        at = f", position {position}" if position >= 0 else ""
        super().__init__(f"rank {rank}, communicator {communicator}{at}: {words}")
        self.rank = rank
        self.communicator = communicator
        self.position = position


def groups_of(plan: SequencePlan) -> Mapping[str, GroupOf]:
    """By kind of communicator, but for the world, the function by which a rank finds its group."""
    nodes = plan.nodes
    if not plan.by_nodes or nodes is None:
        return GROUPS

    def on_node(place: Coordinates, layout: LayoutConfig, order: str) -> List[int]:
        return node_groups(place, layout, order, nodes)[0]

    def across(place: Coordinates, layout: LayoutConfig, order: str) -> List[int]:
        return node_groups(place, layout, order, nodes)[1]

    return {**GROUPS, NODE: on_node, ACROSS: across, NODE_GATHER: on_node, ACROSS_GATHER: across}


def agreed_groups(
    places: Sequence[Coordinates], plan: SequencePlan, groups: Mapping[str, GroupOf]
) -> Dict[str, List[Tuple[int, ...]]]:
    """By kind of communicator, the group of each rank.

    Raises:
        GridError: members of a group do not agree on it, or it is not where it should be.
    """
    members = {kind: _groups(kind, group_of, places, plan) for kind, group_of in groups.items()}
    for on_node, across in ((NODE, ACROSS), (NODE_GATHER, ACROSS_GATHER)):
        if on_node in members:
            _check_steps(on_node, across, members, plan)
    return members


def _groups(kind: str, group_of: GroupOf, places: Sequence[Coordinates], plan: SequencePlan) -> List[Tuple[int, ...]]:
    """The group of each rank as the rank itself sees it, once all members are found to agree."""
    views: Dict[Tuple[int, ...], Tuple[int, ...]] = {}  # each group once, however many ranks see it
    claimed: Dict[Tuple[int, ...], List[int]] = {}
    found = []
    for rank, place in enumerate(places):
        view = tuple(group_of(place, plan.layout, plan.order))
        found.append(views.setdefault(view, view))
        claimed.setdefault(view, []).append(rank)
    for view, ranks in claimed.items():
        if sorted(view) != ranks:
            odd = sorted(set(view).symmetric_difference(ranks)) or list(view)
            those = in_short(ranks)
            words = f"its group is {in_short(view)}, but ranks {those} see themselves in it; look at rank {odd[0]}"
            raise GridError(ranks[0], kind, -1, words)
        _check_seats(kind, view, places, plan)
    return found


def _check_seats(kind: str, view: Sequence[int], places: Sequence[Coordinates], plan: SequencePlan) -> None:
    """The members of a group sit along its axis, in order, and share the other two coordinates."""
    first, last = places[view[0]], plan.layout.pp - 1
    if kind in (NODE, ACROSS, NODE_GATHER, ACROSS_GATHER):
        seats = [replace(first, dp=position) for position in sorted(places[rank].dp for rank in view)]
    elif kind == "embedding":
        stages = [0, last] if last and first.pp in (0, last) else [first.pp]
        seats = [replace(first, pp=stage) for stage in stages]
    else:
        seats = [replace(first, **{kind: position}) for position in range(getattr(plan.layout, kind))]
    if [places[rank] for rank in view] != seats:
        words = f"its group {in_short(view)} is not the ranks along {kind} from {seats[0]} to {seats[-1]}, in order"
        raise GridError(view[0], kind, -1, words)


def _check_steps(on_node: str, across: str, members: Mapping[str, List[Tuple[int, ...]]], plan: SequencePlan) -> None:
    """The two steps of a sum by nodes first bring all replicas together: each group across has one rank of each node,
    all at the same place there; or there is one step for all."""
    assert plan.nodes is not None
    for replicas in dict.fromkeys(members["dp"]):
        if all(len(members[kind][rank]) == 1 for kind in (on_node, across) for rank in replicas):
            continue
        for view in dict.fromkeys(members[on_node][rank] for rank in replicas):
            if len({plan.nodes.of(rank) for rank in view}) > 1:
                raise GridError(view[0], on_node, -1, f"its group {in_short(view)} is on several nodes")
        for view in dict.fromkeys(members[across][rank] for rank in replicas):
            met = sorted(other for rank in view for other in members[on_node][rank])
            if met != sorted(replicas) or len({members[on_node][rank].index(rank) for rank in view}) > 1:
                words = (
                    f"with its group {in_short(view)} it meets {in_short(met)}; its replicas are {in_short(replicas)}"
                )
                raise GridError(view[0], across, -1, words)


def in_short(ranks: Sequence[int]) -> str:
    """The first of many ranks."""
    return ", ".join(map(str, ranks[:6])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 6 else "")
