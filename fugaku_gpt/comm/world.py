"""Joins the job: all of its ranks as one communicator, and facts about the MPI library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.comm.mpi import MPI, mpi4py
from fugaku_gpt.machine.local import usable_cores

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def open_world(flight_dir: Optional[Path] = None, threads: int = 1, checks: bool = False) -> Communicator:
    """All ranks of this job; with ``flight_dir``, each keeps its flight recorder there. Collective.

    ``threads`` is what each rank computes with: where a node's ranks have more threads than cores, they wait for each
    other without holding a core. ``checks``: compare calls between the ranks before they are made.
    """
    world = MPI.COMM_WORLD
    recorder = None
    if flight_dir is not None:
        recorder = FlightRecorder(flight_dir, world.Get_rank(), world.Get_size())
    return Communicator(world, "world", recorder, shares_cores=_shares_cores(world, threads), checks=checks)


def _shares_cores(world: MPI.Intracomm, threads: int) -> bool:
    """Whether the ranks of any node have more threads than that node has cores for them; equal on every rank."""
    cores = list(usable_cores())
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    # not os.cpu_count(): the cores of an A64FX node are numbered 12 to 59, and 48 to 50 are counted
    numbers = np.array([max(cores) + 1], dtype=np.int32)
    node.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
    usable = np.zeros(int(numbers[0]), dtype=np.int32)
    usable[cores] = 1
    node.Allreduce(MPI.IN_PLACE, usable, MPI.MAX)  # ranks may be bound to cores of their own
    crowded = np.array([node.Get_size() * threads > int(usable.sum())], dtype=np.int32)
    world.Allreduce(MPI.IN_PLACE, crowded, MPI.MAX)
    node.Free()
    return bool(crowded[0])


def mpi_facts() -> Dict[str, Any]:
    """The MPI library, its thread level, and the version of mpi4py."""
    return {
        "library": MPI.Get_library_version().replace("\0", "").strip().splitlines()[0].strip(),
        "standard": ".".join(str(part) for part in MPI.Get_version()),
        "thread_level": _LEVELS[MPI.Query_thread()],
        "mpi4py": mpi4py.__version__,
        "host": MPI.Get_processor_name(),
    }
