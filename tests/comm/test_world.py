"""Tests of what the ranks find out about their nodes when they join."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import pytest

from fugaku_gpt.comm import world
from fugaku_gpt.comm.mpi import MPI


class Node:
    """Stands in for the communicator of all ranks of one node, each bound to the cores of its mask."""

    def __init__(self, masks: Sequence[Sequence[int]]) -> None:
        self.masks = masks

    def Get_size(self) -> int:
        return len(self.masks)

    def Split_type(self, kind: int) -> "Node":
        assert kind == MPI.COMM_TYPE_SHARED
        return self

    def Free(self) -> None:
        pass

    def Allreduce(self, send: Any, values: "np.ndarray[Any, np.dtype[np.int32]]", operation: MPI.Op) -> None:
        assert operation == MPI.MAX
        if len(values) > 1:  # the usable cores, of which the caller has set those of the first rank
            values[[core for mask in self.masks for core in mask]] = 1
        elif values[0] > 1:  # one more than the largest number of a core
            values[0] = 1 + max(max(mask) for mask in self.masks)


@pytest.mark.parametrize("online", [48, 50, 52, 60])  # with and without assistant cores, which have numbers below 12
@pytest.mark.parametrize(("threads", "crowded"), [(12, False), (13, True)])
def test_a_full_a64fx_node_is_crowded_only_by_more_threads_than_cores(
    threads: int, crowded: bool, online: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = [range(12 + 12 * rank, 24 + 12 * rank) for rank in range(4)]  # cores 12 to 59
    monkeypatch.setattr("os.cpu_count", lambda: online)
    monkeypatch.setattr(world, "usable_cores", lambda: list(masks[0]))
    node: Any = Node(masks)
    assert world._shares_cores(node, threads) is crowded


def test_cores_that_ranks_share_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "usable_cores", lambda: [0, 1])
    node: Any = Node([[0, 1], [0, 1]])
    assert not world._shares_cores(node, 1) and world._shares_cores(node, 2)
