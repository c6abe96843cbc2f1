"""A box of the torus for a number of nodes, and the node of each rank.

Ranks are in the order ``tp,pp,dp`` and fill one node after the other. So the nodes of a tensor-parallel group follow
one another, and so do those of a replica's stages: only a path through the box remains to be chosen. On a boustrophedon
path every node is a neighbour of the previous one. If a tensor-parallel group has several nodes, the path goes from
group to group, each a small box of the same shape, so that corresponding ranks of two groups are as far from each other
as the groups.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.formulas.divisors import divisors_of
from fugaku_gpt.machine.fugaku import LONGEST_SIDES, TORUS_ABOVE, allocated_nodes

BoxSides = Tuple[int, int, int]


@dataclass(frozen=True)
class NodeBox:
    """A box of nodes as a job asks for it.

    Args:
        allocation: ``torus``, or ``mesh``, which allocates the box alone and is for small jobs.
        allocated: least number of nodes that are paid for.
    """

    sides: BoxSides
    allocation: str
    allocated: int

    @property
    def shape(self) -> str:
        """The sides as ``job.shape`` has them."""
        return "x".join(str(side) for side in self.sides)


@dataclass(frozen=True)
class RankMap:
    """The node of each rank.

    Args:
        path: [nodes, 3] coordinates of the nodes in the order in which ranks fill them.
        groups_within_nodes: whether every tensor-parallel group lies inside a node.
        group_hops: largest distance between two nodes of a tensor-parallel group, on a mesh.
        stage_hops: largest distance between the nodes of neighbouring stages, over all replicas.
    """

    node_box: NodeBox
    ranks_per_node: int
    path: "np.ndarray"
    groups_within_nodes: bool
    group_hops: int
    stage_hops: int

    def node_of(self, rank: int) -> Tuple[int, int, int]:
        """Coordinates of a rank's node."""
        x, y, z = (int(coordinate) for coordinate in self.path[rank // self.ranks_per_node])
        return x, y, z

    def hostfile_text(self) -> str:
        """The file of PJM's ``rank-map-hostfile``: one line for each rank with its node's coordinates."""
        lines = [f"({x},{y},{z})\n" * self.ranks_per_node for x, y, z in self.path.tolist()]
        distances = f"inside a node; stages at most {self.stage_hops} apart"
        if not self.groups_within_nodes:
            distances = f"over nodes at most {self.group_hops} apart; stages at most {self.stage_hops} apart"
        return f"# node of each rank in {self.node_box.shape}; tensor-parallel groups {distances}\n" + "".join(lines)


def choose_node_box(nodes: int, shape: str = "") -> Optional[NodeBox]:
    """The box that wastes the fewest nodes, among equals the one closest to a cube; None if no box has ``nodes`` nodes.

    A torus is allocated in whole units (see :mod:`fugaku_gpt.machine.fugaku`). Up to 384 nodes, a mesh is used where a
    torus would be rounded up.

    Args:
        shape: three sides as in ``job.shape``, which fix the box; with fewer sides the box is chosen.
    """
    sides = [int(side) for side in shape.split("x")] if shape else []
    boxes = [(sides[0], sides[1], sides[2])] if len(sides) == 3 else list(_boxes(nodes))
    if not boxes:
        return None
    rounded, _, best = min((allocated_nodes(box, is_torus=True), sum(box), box) for box in boxes)
    if nodes <= TORUS_ABOVE and rounded > nodes:
        return NodeBox(min((sum(box), box) for box in boxes)[1], "mesh", nodes)
    return NodeBox(best, "torus", rounded)


def choose_rank_map(node_box: NodeBox, layout: LayoutConfig, ranks_per_node: int) -> RankMap:
    """The map with the smallest distance between stages, then between the nodes of a tensor-parallel group."""
    tp, pp = layout.tp, layout.pp
    spread = tp // ranks_per_node if tp % ranks_per_node == 0 else 1  # nodes of a group, if groups fill nodes
    candidates = []
    for unit in _boxes(spread, node_box.sides):
        counts = [side // unit_side for side, unit_side in zip(node_box.sides, unit)]
        for axes in itertools.permutations(range(3)):
            steps = _boustrophedon(counts, axes) * np.array(unit)
            hops = np.abs(np.diff(steps, axis=0)).sum(axis=1)
            # a node may hold several groups; then replicas may start inside a node
            groups_per_step = max(1, ranks_per_node // tp)
            # steps from stage to stage, not to the next replica
            within_replica = np.arange(1, len(steps)) * groups_per_step % pp != 0
            farthest = int(hops[within_replica].max()) if within_replica.any() else 0
            candidates.append((farthest, sum(unit), int(hops.sum()), unit, axes))
    if not candidates:  # a group's nodes form no box that divides this one
        unit, axes, spread = (1, 1, 1), (0, 1, 2), 1
    else:
        _, _, _, unit, axes = min(candidates)
    counts = [side // unit_side for side, unit_side in zip(node_box.sides, unit)]
    steps = _boustrophedon(counts, axes) * np.array(unit)
    members = _boustrophedon(unit, axes)
    path = (steps[:, None, :] + members[None, :, :]).reshape(-1, 3)
    return _build_rank_map(node_box, layout, ranks_per_node, path)


def _build_rank_map(node_box: NodeBox, layout: LayoutConfig, ranks_per_node: int, path: "np.ndarray") -> RankMap:
    ranks = np.arange(layout.ranks)
    nodes = ranks // ranks_per_node
    coordinates = path[nodes].reshape(layout.dp, layout.pp, layout.tp, 3)
    groups = nodes.reshape(-1, layout.tp)
    stage = np.abs(np.diff(coordinates, axis=1)).sum(axis=-1)
    extent = (coordinates.max(axis=2) - coordinates.min(axis=2)).sum(axis=-1)
    return RankMap(
        node_box=node_box,
        ranks_per_node=ranks_per_node,
        path=path,
        groups_within_nodes=bool((groups == groups[:, :1]).all()),
        group_hops=int(extent.max()),
        stage_hops=int(stage.max()) if stage.size else 0,
    )


def _boustrophedon(counts: Sequence[int], axes: Sequence[int]) -> "np.ndarray":
    """Every cell of a box once [product of counts, 3], each beside the previous one; ``axes`` has the fastest first."""
    cells = np.zeros((1, 3), dtype=np.int64)
    for axis in axes:
        layers: List["np.ndarray"] = []
        for level in range(counts[axis]):
            layer = cells[:: -1 if level % 2 else 1].copy()
            layer[:, axis] = level
            layers.append(layer)
        cells = np.concatenate(layers)
    return cells


def _boxes(nodes: int, container: Sequence[int] = ()) -> Iterator[BoxSides]:
    """Boxes of ``nodes`` nodes that exist on the machine; with ``container``, those whose sides divide its sides."""
    for x in divisors_of(nodes):
        for y in divisors_of(nodes // x):
            box = (x, y, nodes // x // y)
            if container:
                if not any(side % box_side for side, box_side in zip(container, box)):
                    yield box
            elif all(side <= most for side, most in zip(sorted(box), LONGEST_SIDES)):
                yield box
