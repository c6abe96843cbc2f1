"""A box of the torus for a number of nodes, and where in it each rank goes.

Ranks are in the order ``tp,pp,dp`` and fill one node after the other. So the nodes of a tensor-parallel group follow
one another, and so do those of a replica's stages: what is left to choose is a path through the box. A path that goes
to and fro (boustrophedon) makes every node the neighbour of the one before. Where a tensor-parallel group has several
nodes, the path goes from group to group, each a small box of the same form, so that the ranks at one place of two
groups are as far apart as the groups.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.formulas.divisors import divisors_of
from fugaku_gpt.machine.fugaku import LONGEST_SIDES, SHELF, TOFU_UNIT, TORUS_ABOVE

Box = Tuple[int, int, int]


@dataclass(frozen=True)
class Torus:
    """A box of nodes as a job asks for it.

    Args:
        allocation: ``torus``, or ``mesh``, which takes the box alone and is for small jobs.
        allocated: nodes that are paid for, at least.
    """

    sides: Box
    allocation: str
    allocated: int

    @property
    def shape(self) -> str:
        """As in ``job.shape``."""
        return "x".join(str(side) for side in self.sides)


@dataclass(frozen=True)
class RankMap:
    """Where each rank goes.

    Args:
        path: [nodes, 3] coordinates of the nodes that ranks fill, in their order.
        inside: every tensor-parallel group lies inside a node.
        group_hops: between the nodes of one tensor-parallel group that are farthest apart, on a mesh.
        stage_hops: between the nodes of neighbouring stages, the farthest of all replicas.
    """

    torus: Torus
    ranks_per_node: int
    path: "np.ndarray"
    inside: bool
    group_hops: int
    stage_hops: int

    def node_of(self, rank: int) -> Box:
        """Coordinates of a rank's node."""
        x, y, z = (int(one) for one in self.path[rank // self.ranks_per_node])
        return x, y, z

    def text(self) -> str:
        """The file of PJM's ``rank-map-hostfile``: of each rank its node's coordinates, a line each."""
        lines = [f"({x},{y},{z})\n" * self.ranks_per_node for x, y, z in self.path.tolist()]
        said = f"inside a node; stages at most {self.stage_hops} apart"
        if not self.inside:
            said = f"over nodes at most {self.group_hops} apart; stages at most {self.stage_hops} apart"
        return f"# node of each rank in {self.torus.shape}; tensor-parallel groups {said}\n" + "".join(lines)


def torus_of(nodes: int, shape: str = "") -> Optional[Torus]:
    """The box that wastes fewest nodes, and of those the one nearest to a cube; None where no box has so many nodes.

    A torus is allocated in whole units (see :mod:`fugaku_gpt.machine.fugaku`). Up to 384 nodes, a mesh is taken where a
    torus would be rounded up.

    Args:
        shape: of three sides, as in ``job.shape``: this box and no other.
    """
    sides = [int(side) for side in shape.split("x")] if shape else []
    boxes = [(sides[0], sides[1], sides[2])] if len(sides) == 3 else list(_boxes(nodes))
    if not boxes:
        return None
    unit = SHELF if nodes > TORUS_ABOVE else TOFU_UNIT
    rounded, _, best = min((_rounded(box, unit), sum(box), box) for box in boxes)
    if nodes <= TORUS_ABOVE and rounded > nodes:
        return Torus(min((sum(box), box) for box in boxes)[1], "mesh", nodes)
    return Torus(best, "torus", rounded)


def rank_map(torus: Torus, layout: LayoutConfig, ranks_per_node: int) -> RankMap:
    """The map that keeps stages nearest, then the nodes of a tensor-parallel group."""
    tp, pp = layout.tp, layout.pp
    spread = tp // ranks_per_node if tp % ranks_per_node == 0 else 1  # nodes of a group, where groups fill them
    found = []
    for unit in _boxes(spread, torus.sides):
        counts = [side // one for side, one in zip(torus.sides, unit)]
        for axes in itertools.permutations(range(3)):
            steps = _to_and_fro(counts, axes) * np.array(unit)
            hops = np.abs(np.diff(steps, axis=0)).sum(axis=1)
            # groups per step of the path: several where a node holds several; then chains may start inside a node
            groups = max(1, ranks_per_node // tp)
            within = np.arange(1, len(steps)) * groups % pp != 0  # steps from stage to stage, not to the next replica
            farthest = int(hops[within].max()) if within.any() else 0
            found.append((farthest, sum(unit), int(hops.sum()), unit, axes))
    if not found:  # a group's nodes are no box here
        unit, axes, spread = (1, 1, 1), (0, 1, 2), 1
    else:
        _, _, _, unit, axes = min(found)
    counts = [side // one for side, one in zip(torus.sides, unit)]
    steps = _to_and_fro(counts, axes) * np.array(unit)
    members = _to_and_fro(unit, axes)
    path = (steps[:, None, :] + members[None, :, :]).reshape(-1, 3)
    return _measured(torus, layout, ranks_per_node, path)


def _measured(torus: Torus, layout: LayoutConfig, ranks_per_node: int, path: "np.ndarray") -> RankMap:
    ranks = np.arange(layout.ranks)
    nodes = ranks // ranks_per_node
    places = path[nodes].reshape(layout.dp, layout.pp, layout.tp, 3)
    groups = nodes.reshape(-1, layout.tp)
    stage = np.abs(np.diff(places, axis=1)).sum(axis=-1)
    reach = (places.max(axis=2) - places.min(axis=2)).sum(axis=-1)
    return RankMap(
        torus=torus,
        ranks_per_node=ranks_per_node,
        path=path,
        inside=bool((groups == groups[:, :1]).all()),
        group_hops=int(reach.max()),
        stage_hops=int(stage.max()) if stage.size else 0,
    )


def _to_and_fro(counts: Sequence[int], axes: Sequence[int]) -> "np.ndarray":
    """[product of counts, 3] every cell of a box once, each beside the one before; ``axes`` fastest first."""
    cells = np.zeros((1, 3), dtype=np.int64)
    for axis in axes:
        layers: List["np.ndarray"] = []
        for level in range(counts[axis]):
            layer = cells[:: -1 if level % 2 else 1].copy()
            layer[:, axis] = level
            layers.append(layer)
        cells = np.concatenate(layers)
    return cells


def _boxes(nodes: int, inside: Sequence[int] = ()) -> Iterator[Box]:
    """Boxes of so many nodes that the machine has; with ``inside``, those whose sides divide that box's."""
    for x in divisors_of(nodes):
        for y in divisors_of(nodes // x):
            box = (x, y, nodes // x // y)
            if inside:
                if not any(side % one for side, one in zip(inside, box)):
                    yield box
            elif all(one <= most for one, most in zip(sorted(box), LONGEST_SIDES)):
                yield box


def _rounded(box: Box, unit: Sequence[int]) -> int:
    """Nodes of a box in whole units, turned as fits best."""
    return min(
        math.prod(-(-side // one) * one for side, one in zip(box, turned)) for turned in itertools.permutations(unit)
    )
