"""The ranks as a grid dp × pp × tp, with one communicator along each axis."""

from __future__ import annotations

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.layout.grid import coordinates_of


class ProcessGrid:
    """This rank's place and groups.

    Attributes:
        world: all ranks.
        place: this rank's (dp, pp, tp).
        tp: the ranks that share each layer with this one.
        pp: the pipeline's stages, in order.
        dp: the ranks that hold the same weights as this one.
        embedding: the first and the last stage of a pipeline, which both hold the token embedding; elsewhere a group
            of one.
    """

    def __init__(self, world: Communicator, layout: LayoutConfig) -> None:
        """Collective over ``world``: one split per axis, whatever the number of groups.

        Raises:
            ValueError: the world has not as many ranks as the layout.
        """
        if world.size != layout.ranks:
            raise ValueError(f"a layout of {layout.ranks} ranks was given {world.size} ranks")
        self.world = world
        self.layout = layout
        self.place = coordinates_of(world.rank, layout)
        dp, pp, tp = self.place.dp, self.place.pp, self.place.tp
        pipeline = dp * layout.tp + tp
        self.tp = world.split(color=dp * layout.pp + pp, key=tp, name="tp")
        self.pp = world.split(color=pipeline, key=pp, name="pp")
        self.dp = world.split(color=pp * layout.tp + tp, key=dp, name="dp")
        ends = layout.pp > 1 and pp in (0, layout.pp - 1)
        self.embedding = world.split(color=pipeline if ends else None, key=pp, name="embedding")

    @classmethod
    def alone(cls) -> "ProcessGrid":
        """The grid of one process, without MPI."""
        return cls(Communicator.alone("world"), LayoutConfig())
