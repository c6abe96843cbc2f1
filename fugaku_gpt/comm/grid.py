"""The ranks as a grid dp × pp × tp, with one communicator along each axis."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Optional, Sequence, Union

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.comm.hierarchical import HierarchicalComm, hierarchical_comm
from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.layout.grid import Coordinates, coordinates_of, dp_group, embedding_group, kv_group, pp_group, tp_group


class ProcessGrid:
    """This rank's coordinates and groups.

    Attributes:
        world: all ranks.
        coordinates: this rank's (dp, pp, tp).
        tp: the ranks that share each layer with this one.
        kv: those of them that hold the same head of keys and values as this one.
        pp: the pipeline's stages, in order.
        dp: the ranks that hold the same weights as this one.
        replicas: the communicator for sums over them: ``dp`` itself, or a hierarchical one; the same kind on all ranks.
        why_flat: why sums are not hierarchical although the layout asks for it; otherwise empty.
        embedding: the first and the last stage of a pipeline, which both hold the token embedding; elsewhere a group
            of one.
    """

    def __init__(
        self, world: Communicator, layout: LayoutConfig, node: Optional[int] = None, kv_copies: int = 1
    ) -> None:
        """Collective over ``world``: one split per axis, whatever the number of groups.

        Args:
            node: number of this rank's node; default: detected.
            kv_copies: tensor-parallel ranks that hold the same head of keys and values (``RunConfig.kv_copies``).

        Raises:
            ValueError: the world and the layout have different numbers of ranks.
        """
        if world.size != layout.ranks:
            raise ValueError(f"a layout of {layout.ranks} ranks was given {world.size} ranks")
        self.world = world
        self.layout = layout
        self.coordinates = coordinates_of(world.rank, layout, layout.order)
        self.tp = self._group(tp_group, "tp")
        copies_alike = partial(kv_group, copies=kv_copies)
        self.kv = self._group(copies_alike, "kv") if kv_copies > 1 else Communicator.alone("kv")
        self.pp = self._group(pp_group, "pp")
        self.dp = self._group(dp_group, "dp")
        self.embedding = self._group(embedding_group, "embedding")
        hierarchical, self.why_flat = None, ""
        if layout.hierarchical_sum:
            hierarchical, self.why_flat = hierarchical_comm(self.dp, world, node)
        self.replicas: Union[Communicator, HierarchicalComm] = hierarchical if hierarchical is not None else self.dp

    def _group(self, members: Callable[[Coordinates, LayoutConfig, str], Sequence[int]], name: str) -> Communicator:
        group = members(self.coordinates, self.layout, self.layout.order)
        color = group[0] if len(group) > 1 else None  # whoever is alone needs no communicator
        return self.world.split(color, key=group.index(self.world.rank), name=name)

    @property
    def sum_facts(self) -> Dict[str, Any]:
        """How sums over replicas are done, for the records."""
        nodes = self.replicas.nodes if isinstance(self.replicas, HierarchicalComm) else 1
        return {
            "replicas": self.dp.size,
            "node_first": nodes > 1,
            "nodes": nodes,
            "why_flat": self.why_flat,
        }

    @classmethod
    def alone(cls) -> "ProcessGrid":
        """The grid of one process, without MPI."""
        return cls(Communicator.alone("world"), LayoutConfig())
