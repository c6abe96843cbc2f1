"""Joining the job: all of its ranks as one communicator, and what MPI library it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.comm.mpi import MPI, mpi4py

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def open_world(flight_dir: Optional[Path] = None) -> Communicator:
    """All ranks of this job; with ``flight_dir``, each keeps its flight recorder there."""
    world = MPI.COMM_WORLD
    recorder = None
    if flight_dir is not None and world.Get_size() > 1:
        recorder = FlightRecorder(flight_dir, world.Get_rank(), world.Get_size())
    return Communicator(world, "world", recorder)


def mpi_facts() -> Dict[str, Any]:
    """The MPI library, its thread level, and the version of mpi4py."""
    return {
        "library": MPI.Get_library_version().replace("\0", "").strip().splitlines()[0].strip(),
        "standard": ".".join(str(part) for part in MPI.Get_version()),
        "thread_level": _LEVELS[MPI.Query_thread()],
        "mpi4py": mpi4py.__version__,
        "host": MPI.Get_processor_name(),
    }
