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
        dp: the ranks that hold the same weights as this one.
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
        stage = self.place.dp * layout.pp + self.place.pp
        shard = self.place.pp * layout.tp + self.place.tp
        self.tp = world.split(color=stage, key=self.place.tp, name="tp")
        self.dp = world.split(color=shard, key=self.place.dp, name="dp")

    @classmethod
    def alone(cls) -> "ProcessGrid":
        """The grid of one process, without MPI."""
        return cls(Communicator.alone("world"), LayoutConfig())
