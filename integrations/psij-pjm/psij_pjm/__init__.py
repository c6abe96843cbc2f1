"""PSI/J on PJM, the batch system of Fugaku: the executor ``pjm`` and the launcher ``pjm_mpiexec``."""

# PSI/J loads the executor while it is imported itself: with any module of this package it must come first.
import psij  # noqa: F401
