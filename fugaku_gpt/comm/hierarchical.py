"""Sums over replicas in two steps: within each node, where memory is shared, then between nodes, each replica of a node
with its share. Per rank, the network then carries 1 / (replicas on a node) of the data of a flat sum.

The steps of one sum follow each other without blocking: each is started when the previous one is seen to have ended.
Steps are started in the order of the sums, and each step has its own communicator, so that the order on each
communicator is the same on all of its ranks, whenever they poll. Every wait polls, whatever it waits for: no rank waits
for a step that a rank waiting elsewhere has not started.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Tuple

import torch

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.comm.pending import MULTI_STEP, Pending


class ChainedRequest:
    """Communications that each start when the previous one has ended; used like :class:`Pending`."""

    def __init__(self, steps: List[Callable[[], Pending]], previous: Optional["ChainedRequest"]) -> None:
        self._steps = steps
        self._previous = previous
        self._begun = 0
        self._current: Optional[Pending] = None
        MULTI_STEP.add(self)
        self.done()

    def done(self) -> bool:
        """Whether all of them have ended; starts the next one when it is due, and does not wait."""
        while self._current is None or self._current.done():
            if self._begun == len(self._steps):
                self._previous = None
                MULTI_STEP.discard(self)
                return True
            if self._is_blocked():
                return False
            self._current = self._steps[self._begun]()
            self._begun += 1
        return False

    def wait(self) -> None:
        """Wait until all of them have ended."""
        while not self.done():
            self._wait_for_progress()

    def _until(self, count: int) -> None:
        while self._begun < count:
            self._wait_for_progress()
            self.done()

    def _wait_for_progress(self) -> None:
        """Wait for whatever blocks this chain."""
        if self._current is not None and not self._current.done():
            self._current.wait()
        elif self._previous is not None and self._is_blocked():
            self._previous._until(self._begun + 1)

    def _is_blocked(self) -> bool:
        """Whether the next step is not due yet: the previous sum has the same step and has not started it."""
        if self._previous is None or self._begun == len(self._steps):
            return False
        return self._previous._begun <= self._begun < len(self._previous._steps)


class HierarchicalComm:
    """Replicas on nodes with equally many each; offers a communicator's sums and gathers, in two steps.

    Attributes:
        size: replicas.
        nodes: number of nodes that hold them.
        rank: this one's place in the order of shares: within a node first.
    """

    def __init__(self, node: Communicator, across: Communicator) -> None:
        """``node``: the replicas on this node; ``across``: those at this one's place on every node. Collective."""
        self._node = node
        self._across = across
        self._node_gathering, self._across_gathering = (
            group.split(0, group.rank, f"{group.name}-gather") for group in (node, across)
        )
        self.size = node.size * across.size
        self.nodes = across.size
        self.rank = node.rank * across.size + across.rank
        self._last_sum: Optional[ChainedRequest] = None
        self._last_gather: Optional[ChainedRequest] = None

    def start_all_reduce(self, tensor: torch.Tensor) -> ChainedRequest:
        """As :meth:`Communicator.start_all_reduce`, of [elements] that divide by the replicas of a node."""
        size = tensor.numel() // self._node.size
        first, node_share = tensor[:size], tensor[self._node.rank * size : (self._node.rank + 1) * size]

        def gather() -> Pending:
            if self._node.rank:
                node_share.copy_(first)
            return self._node_gathering.start_all_gather(tensor)

        return self._sum(
            [
                lambda: self._node.start_reduce_scatter(tensor),
                lambda: self._across.start_all_reduce(first),
                gather,
            ]
        )

    def start_reduce_scatter(self, tensor: torch.Tensor) -> ChainedRequest:
        """As :meth:`Communicator.start_reduce_scatter`; the share is that of :attr:`rank`."""
        first = tensor[: tensor.numel() // self._node.size]
        return self._sum(
            [lambda: self._node.start_reduce_scatter(tensor), lambda: self._across.start_reduce_scatter(first)]
        )

    def start_all_gather(self, tensor: torch.Tensor) -> ChainedRequest:
        """As :meth:`Communicator.start_all_gather`, of shares in the order of :attr:`rank`."""
        size = tensor.numel() // self._node.size
        node_share = tensor[self._node.rank * size : (self._node.rank + 1) * size]
        steps = [
            lambda: self._across_gathering.start_all_gather(node_share),
            lambda: self._node_gathering.start_all_gather(tensor),
        ]
        self._last_gather = ChainedRequest(steps, self._last_gather)
        return self._last_gather

    def _sum(self, steps: List[Callable[[], Pending]]) -> ChainedRequest:
        self._last_sum = ChainedRequest(steps, self._last_sum)
        return self._last_sum


def hierarchical_comm(
    dp: Communicator, world: Communicator, node: Optional[int] = None
) -> Tuple[Optional[HierarchicalComm], str]:
    """A hierarchical communicator for the replicas of ``dp``, or None and the reason; all groups of replicas of the
    world get the same answer. Collective over ``world``.

    All groups have the same numbers of nodes and of replicas on each, and the same share for the same replica. The
    two ends of a pipeline, which add up their shares of the token embedding's gradient, count on that.

    Args:
        node: number of this rank's node; default: by the memory that it shares with others.
    """
    if dp.size == 1:
        return None, "there is one replica only"
    within = dp.on_this_node("dp-node") if node is None else dp.split(node, dp.rank, "dp-node")
    sizes = torch.tensor([within.size, -within.size])
    world.all_reduce(sizes, "max")
    most, fewest = int(sizes[0]), -int(sizes[1])
    if most != fewest:
        return None, f"nodes hold different numbers of replicas, from {fewest} to {most}"
    if most == 1:
        return None, "no node holds two replicas of the same weights"
    if most == dp.size:
        return None, "all replicas of the same weights are on one node"
    across = dp.split(within.rank, dp.rank, "dp-across").unchecked()
    share = within.rank * across.size + across.rank
    shares = torch.full((2, dp.size), -dp.size)
    shares[0, dp.rank], shares[1, dp.rank] = share, -share
    world.all_reduce(shares, "max")
    if not torch.equal(shares[0], -shares[1]):
        return None, "replicas of different weights lie on nodes in different ways"
    # their order differs from rank to rank: no rank may wait for others before it starts one
    return HierarchicalComm(within.unchecked(), across), ""
