"""Compares the clocks of nodes by ping-pong messages.

The ranks of a node read the same clock. One rank of each node compares its own with that of another node, whose offset
from rank 0's is known by then: in each round the nodes that know theirs serve as many others, so that there are as many
rounds as the number of nodes has binary digits. A rank's offset is at most as wrong as the sum of half the shortest
round trips on its way to rank 0 (Cristian 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import math
import time
from typing import Callable, Optional, Tuple

import torch

from fugaku_gpt.comm.communicator import Communicator

_ROUND_TRIPS = 16
Clock = Callable[[], float]


class NodeClocks:
    """The groups of ranks by which clocks are compared. One more comparison takes no more groups."""

    def __init__(self, world: Communicator, node: Optional[int] = None) -> None:
        """Collective over ``world``.

        Args:
            node: number of this rank's node; default: by the memory that it shares with others.
        """
        self._within = world.on_this_node("clock-node") if node is None else world.split(node, world.rank, "clock-node")
        is_first = self._within.rank == 0
        self._firsts = world.split(0 if is_first else None, world.rank, "clock-nodes")
        self._is_first = is_first

    def compare(self, clock: Clock = time.time) -> Tuple[float, float]:
        """The seconds to add to this rank's times to get rank 0's, and how wrong that may be; collective."""
        offset = torch.zeros(2, dtype=torch.float64)
        if self._is_first:
            ranks, rank = self._firsts.size, self._firsts.rank
            knowing = 1
            while knowing < ranks:
                if rank < knowing and rank + knowing < ranks:
                    self._serve(rank + knowing, offset, clock)
                elif knowing <= rank < 2 * knowing:
                    offset = self._ask(rank - knowing, clock)
                knowing *= 2
        self._within.broadcast(offset)
        seconds, error = offset.tolist()
        return seconds, error

    def _serve(self, peer: int, offset: torch.Tensor, clock: Clock) -> None:
        """Answer a node's messages with this one's time, and then with this one's own offset."""
        answer, received = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for _ in range(_ROUND_TRIPS):
            self._firsts.start_receive(received, peer).wait()
            answer[0] = clock()
            self._firsts.start_send(answer, peer).wait()
        self._firsts.start_send(offset, peer).wait()

    def _ask(self, peer: int, clock: Clock) -> torch.Tensor:
        """Compare with a node's clock; the round trip that took least counts."""
        question, received = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        shortest, difference = math.inf, 0.0
        for _ in range(_ROUND_TRIPS):
            sent = clock()
            self._firsts.start_send(question, peer).wait()
            self._firsts.start_receive(received, peer).wait()
            arrived = clock()
            if arrived - sent < shortest:
                shortest, difference = arrived - sent, float(received) - (sent + arrived) / 2
        offset = torch.zeros(2, dtype=torch.float64)
        self._firsts.start_receive(offset, peer).wait()
        return offset + torch.tensor([difference, shortest / 2], dtype=torch.float64)
