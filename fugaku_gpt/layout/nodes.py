"""Which ranks share a node, and the groups over which replicas sum by nodes first: those that ``comm/node_first.py``
makes of a replica group, as every rank can tell from its number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, List, Tuple

from fugaku_gpt.config.schema import LayoutConfig, RunConfig
from fugaku_gpt.layout.grid import Coordinates, dp_group, rank_of

# a gathering runs beside the sums of the next buckets: it has communicators of its own, of the same ranks
NODE, ACROSS, NODE_GATHER, ACROSS_GATHER = "dp-node", "dp-across", "dp-node-gather", "dp-across-gather"


@dataclass(frozen=True)
class Nodes:
    """Where ranks are: as many on each node.

    Attributes:
        count: nodes.
        ranks_per_node: of each.
        dealt: rank after rank goes to the next node; otherwise one node is filled after the other.
    """

    count: int
    ranks_per_node: int
    dealt: bool = False

    def of(self, rank: int) -> int:
        """The number of a rank's node."""
        return rank % self.count if self.dealt else rank // self.ranks_per_node


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
        below, above = (next(n for n in order if ranks % n == 0) for order in _around(number, ranks))
        valid = f"{below} or {above}" if below != above else str(below)
        raise ValueError(f"layout.hierarchical_sum: {key} {number} must divide the {ranks} ranks; valid: {valid}")
    other = ranks // number
    count, each = (number, other) if per_node is None else (other, number)
    return Nodes(count, each, dealt=job.rank_map.partition(":")[0] == "bynode")


def _around(number: int, ranks: int) -> Tuple[range, range]:
    """Numbers from the nearest possible one on, downwards and upwards."""
    nearest = min(number, ranks)
    return range(nearest, 0, -1), range(nearest, ranks + 1)


def node_groups(place: Coordinates, layout: LayoutConfig, order: str, nodes: Nodes) -> Tuple[List[int], List[int]]:
    """The replicas on this rank's node, and those at this one's place on every node.

    Where the replicas are on one node only, one on each, or not equally many on all, or those of other weights are
    spread in another way, they are summed at once, and a rank is alone in both groups.
    """
    if not _spread_alike(layout, order, nodes):
        return [rank_of(place, layout, order)], [rank_of(place, layout, order)]
    replicas = tuple(dp_group(place, layout, order))
    on_node, across = _steps_of(replicas, nodes)[rank_of(place, layout, order)]
    return list(on_node), list(across)


@lru_cache(maxsize=64)
def _spread_alike(layout: LayoutConfig, order: str, nodes: Nodes) -> bool:
    """Whether the same replica has the same place in both groups, whatever part of the weights it holds."""
    places = set()
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            replicas = tuple(dp_group(Coordinates(dp=0, pp=pp, tp=tp), layout, order))
            steps = _steps_of(replicas, nodes)
            places.add(tuple(tuple(group.index(rank) for group in steps[rank]) for rank in replicas))
    return len(places) == 1


@lru_cache(maxsize=1024)
def _steps_of(replicas: Tuple[int, ...], nodes: Nodes) -> Dict[int, Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """Of each of the ranks that hold the same weights, its two groups."""
    shared: Dict[int, List[int]] = {}
    for rank in replicas:
        shared.setdefault(nodes.of(rank), []).append(rank)
    sizes = {len(ranks) for ranks in shared.values()}
    if len(sizes) > 1 or sizes & {1, len(replicas)}:
        return {rank: ((rank,), (rank,)) for rank in replicas}
    across = [tuple(sorted(ranks)) for ranks in zip(*shared.values())]
    return {rank: (tuple(ranks), across[here]) for ranks in shared.values() for here, rank in enumerate(ranks)}
