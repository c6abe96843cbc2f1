"""MPI itself, initialised the one way that this package uses it."""

from __future__ import annotations

import mpi4py

from fugaku_gpt.errors import UsageError

mpi4py.rc.thread_level = "funneled"  # one thread per process calls MPI; the library may then leave out its locks

try:
    from mpi4py import MPI  # importing it initialises MPI, by the setting above
except (ImportError, RuntimeError) as error:  # a wheel of mpi4py looks for a library when it is imported
    raise UsageError(
        f"mpi4py cannot load an MPI library ({error}); install the MPI that it was built for, or pip install "
        "'fugaku_gpt[mpi]'; `fugaku-gpt doctor` looks at both"
    ) from None

__all__ = ["MPI", "mpi4py"]
