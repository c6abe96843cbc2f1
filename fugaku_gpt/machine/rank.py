"""The rank of this process, from its launcher's variables."""

from __future__ import annotations

import os
from typing import Mapping, Optional, Tuple

# (rank, size) of launchers: Open MPI and its derivatives, PMI (MPICH, Slurm), PMIx under Slurm (it has no size)
_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)


def rank_from_environment(environment: Optional[Mapping[str, str]] = None) -> Optional[Tuple[int, int]]:
    """(rank, number of ranks) if a launcher has started this process, else None."""
    variables = os.environ if environment is None else environment
    for rank, size in _RANK_VARIABLES:
        if variables.get(rank, "").isdigit() and variables.get(size, "").isdigit():
            return int(variables[rank]), int(variables[size])
    return None
