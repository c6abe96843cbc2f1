"""MPI over torch tensors: the only room that names ``MPI.``"""

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.comm.grid import ProcessGrid
from fugaku_gpt.comm.pending import BACKGROUND
from fugaku_gpt.comm.world import mpi_facts, open_world

__all__ = ["BACKGROUND", "Communicator", "FlightRecorder", "ProcessGrid", "mpi_facts", "open_world"]
