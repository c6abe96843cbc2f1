"""MPI itself, initialised the one way that this package uses it."""

from __future__ import annotations

import mpi4py

mpi4py.rc.thread_level = "funneled"  # one thread per process calls MPI; the library may then leave out its locks

from mpi4py import MPI  # noqa: E402  # importing it initialises MPI, by the setting above

__all__ = ["MPI", "mpi4py"]
