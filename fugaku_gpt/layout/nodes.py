"""Determines which ranks share a node, and the groups of hierarchical sums: those that ``comm/hierarchical.py`` makes
of a replica group, computed from a rank's number alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, List, Sequence, Tuple

from fugaku_gpt.config.schema import LayoutConfig, RunConfig
from fugaku_gpt.layout.grid import Coordinates, dp_group, evenly_spaced, rank_of

# a gathering runs beside the sums of the next buckets: it has communicators of its own, of the same ranks
NODE, ACROSS_NODES, NODE_GATHER, ACROSS_NODES_GATHER = "dp-node", "dp-across", "dp-node-gather", "dp-across-gather"


@dataclass(frozen=True)
class Nodes:
    """How ranks are placed: equally many on each node.

    Attributes:
        count: nodes.
        ranks_per_node: of each.
        dealt: rank after rank goes to the next node; otherwise one node is filled after the other.
    """

    count: int
    ranks_per_node: int
    round_robin: bool = False

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return rank % self.count if self.round_robin else rank // self.ranks_per_node


def nodes_of(config: RunConfig) -> Nodes:
    """The nodes of a run, from its ranks on each node, or from its nodes, and the scheduler's order.

    Raises:
        ValueError: the ranks do not fill the nodes, or a file that is not read here says where they are.
    """
    ranks, job, per_node = config.layout.ranks, config.job, config.node.ranks_per_node
    if job.rank_map_file:
        raise ValueError(
            "layout.hierarchical_sum: job.rank_map_file says which ranks share a node, and is not read here; leave one "
            "of the two out"
        )
    key, number = ("job.nodes", job.nodes) if per_node is None else ("node.ranks_per_node", per_node)
    if ranks % number:
        below, above = (next(n for n in order if ranks % n == 0) for order in _candidates(number, ranks))
        valid = f"{below} or {above}" if below != above else str(below)
        raise ValueError(f"layout.hierarchical_sum: {key} {number} must divide the {ranks} ranks; valid: {valid}")
    quotient = ranks // number
    count, each = (number, quotient) if per_node is None else (quotient, number)
    return Nodes(count, each, round_robin=job.rank_map.partition(":")[0] == "bynode")


def _candidates(number: int, ranks: int) -> Tuple[range, range]:
    """Numbers from the nearest possible one on, downwards and upwards."""
    nearest = min(number, ranks)
    return range(nearest, 0, -1), range(nearest, ranks + 1)


def node_groups(
    coordinates: Coordinates, layout: LayoutConfig, order: str, nodes: Nodes
) -> Tuple[Sequence[int], Sequence[int]]:
    """The replicas on this rank's node, and those at this rank's position on every node.

    If the replicas are on a single node, or one on each, or unequally many on the nodes, or if replicas of other
    weights are distributed differently, they are summed in one step, and a rank is alone in both groups."""
    rank = rank_of(coordinates, layout, order)
    if not _is_uniform(layout, order, nodes):
        return _alone(rank), _alone(rank)
    return _two_step_groups(dp_group(coordinates, layout, order), nodes)[rank]


@lru_cache(maxsize=64)
def _is_uniform(layout: LayoutConfig, order: str, nodes: Nodes) -> bool:
    """Whether a replica has the same position in both groups for every part of the weights."""
    position_sets = set()
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            replicas = dp_group(Coordinates(dp=0, pp=pp, tp=tp), layout, order)
            steps = _two_step_groups(replicas, nodes)
            position_sets.add(tuple(tuple(group.index(rank) for group in steps[rank]) for rank in replicas))
    return len(position_sets) == 1


@lru_cache(maxsize=1024)
def _two_step_groups(replicas: range, nodes: Nodes) -> Dict[int, Tuple[Sequence[int], Sequence[int]]]:
    """The two groups of each rank that holds the same weights."""
    ranks_by_node: Dict[int, List[int]] = {}
    for rank in replicas:
        ranks_by_node.setdefault(nodes.node_of(rank), []).append(rank)
    sizes = {len(ranks) for ranks in ranks_by_node.values()}
    if len(sizes) > 1 or sizes & {1, len(replicas)}:
        return {rank: (_alone(rank), _alone(rank)) for rank in replicas}
    across = [evenly_spaced(sorted(ranks)) for ranks in zip(*ranks_by_node.values())]
    on_nodes = [evenly_spaced(ranks) for ranks in ranks_by_node.values()]
    return {rank: (ranks, across[position]) for ranks in on_nodes for position, rank in enumerate(ranks)}


def _alone(rank: int) -> range:
    return range(rank, rank + 1)
