"""Tests of what the ranks find out about their nodes when they join."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pytest

from fugaku_gpt.comm import world
from fugaku_gpt.comm.mpi import MPI
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.machine.system import use_system
from tests.support.recorded import CORE_MEMORY_GROUPS, a64fx_node


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


@pytest.mark.parametrize("assistants", [0, 2, 4])
@pytest.mark.parametrize(("threads", "crowded"), [(12, False), (13, True)])
def test_a_full_a64fx_node_is_crowded_only_by_more_threads_than_cores(
    threads: int, crowded: bool, assistants: int, tmp_path: Path
) -> None:
    masks = list(CORE_MEMORY_GROUPS.values())
    node: Any = Node(masks)
    with use_system(a64fx_node(tmp_path, masks[0], assistants)):
        assert world._shares_cores(node, threads) is crowded


_PROGRAM = """
import sys
from pathlib import Path
from fugaku_gpt.comm import open_world
from fugaku_gpt.comm.mpi import MPI
from fugaku_gpt.machine.system import use_system
from tests.support.recorded import a64fx_node
rank = MPI.COMM_WORLD.Get_rank()
cores = range(12, 60) if sys.argv[2] == "unbound" else range(12 + 24 * rank, 36 + 24 * rank)
with use_system(a64fx_node(Path(sys.argv[1]) / str(rank), cores)):
    modes = [open_world(threads=threads)._shares_cores for threads in (24, 25)]
sys.stdout.write(f"modes {modes}\\n")
"""


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
@pytest.mark.parametrize("binding", ["bound", "unbound"])
def test_ranks_of_a_full_a64fx_node_wait_without_sleeping(binding: str, tmp_path: Path) -> None:
    """Two ranks of 24 threads fill the node, whether or not each has cores of its own; one more thread is too many."""
    launcher = find_launcher()
    command = [*launcher.command_prefix(2), sys.executable, "-c", _PROGRAM, str(tmp_path), binding]
    environment = {**os.environ, **launcher.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["modes [False, True]"] * 2


def test_cores_that_ranks_share_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "usable_cores", lambda: [0, 1])
    node: Any = Node([[0, 1], [0, 1]])
    assert not world._shares_cores(node, 1) and world._shares_cores(node, 2)
