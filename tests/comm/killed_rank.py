"""A program for two ranks: rank 0 is killed while it waits in a collective that rank 1 never enters.

mpirun -n 2 python -m tests.comm.killed_rank FLIGHT_DIR
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from fugaku_gpt.comm import Communicator, open_world
from fugaku_gpt.records.flight import flight_file, read_flight

PATIENCE_SECONDS = 300.0
OUTLIVED = "mpirun has not noticed the killed rank"


def refuse_gaps(world: Communicator) -> None:
    """Tensors with gaps are refused by every collective, before anything is sent or recorded."""
    with_gaps = torch.zeros(4, 4).t()[1:]
    for collective in (world.all_reduce, world.broadcast, world.all_gather):
        try:
            collective(with_gaps)  # type: ignore[operator]
        except ValueError as error:
            assert "contiguous" in str(error) and "(3, 4)" in str(error)
        else:
            raise AssertionError(f"{collective} took a tensor with gaps")


def main() -> None:
    """Run one of the two ranks."""
    directory = Path(sys.argv[1])
    world = open_world(directory)
    refuse_gaps(world)
    world.barrier()
    if world.rank == 0:
        world.all_reduce(torch.zeros(3, 2), "max")  # waits for ever
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        flight = read_flight(flight_file(directory, 0))
        if flight.calls and flight.calls[-1].operation == "all_reduce_max":
            os.kill(flight.head.process, signal.SIGKILL)
            break
        time.sleep(0.01)
    time.sleep(PATIENCE_SECONDS)  # mpirun ends this rank: the other has died
    print(OUTLIVED, flush=True)


if __name__ == "__main__":
    main()
