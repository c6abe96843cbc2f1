"""The rank of this process in a parallel launch, from its launcher's variables."""

from __future__ import annotations

import os
from typing import Dict, Mapping, NamedTuple, Optional, Tuple

# (rank, number of ranks) of launchers: Open MPI and its derivatives, PMI (MPICH, Slurm), PMIx under Slurm
_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
# numbers of ranks on this node: Open MPI, MPICH
_NODE_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Fujitsu's mpiexec gives a process its rank and its number on its node, and no number of ranks (user guide, environment
# variables in MPI processes).
_FUJITSU_RANK, _FUJITSU_NODE_RANK = "PMIX_RANK", "PLE_RANK_ON_NODE"
# Variables that tell a process its place in a launch: those of MPICH, of Open MPI with either runtime, and of PMIx
_LAUNCH_PREFIXES = (
    "HYDI_", "MPI_LOCAL", "PMI_", "PMIX_", "PRTE_",
    "OMPI_APP_", "OMPI_COMM_WORLD_", "OMPI_FILE_", "OMPI_FIRST_", "OMPI_NUM_", "OMPI_UNIVERSE_", "OMPI_WORLD_",
    "OMPI_MCA_ess_", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "OMPI_MCA_orte_", "OMPI_MCA_pmix",
)  # fmt: skip
# settings of MPICH's launcher for another launch: its hosts, interfaces and time limit would be those of this one
_LAUNCHER_PREFIXES = ("HYDRA_", "MPIEXEC_")
_SETTINGS_PREFIXES = ("PMIX_MCA_", "PRTE_MCA_")
_LAUNCH_VARIABLES = ("OMPI_ARGV", "OMPI_COMMAND", _FUJITSU_NODE_RANK)


class LaunchedRank(NamedTuple):
    """A process of a parallel launch.

    Attributes:
        rank: its rank.
        ranks: number of ranks of the launch; None where the launcher does not tell: MPI knows it, once initialised.
        variables: names of the variables that say so.
    """

    rank: int
    ranks: Optional[int]
    variables: Tuple[str, ...] = ()


def launched_rank(environment: Optional[Mapping[str, str]] = None) -> Optional[LaunchedRank]:
    """Return the rank of this process if a launcher has started it, else None.

    The variables of Fujitsu's ``mpiexec`` go before all others: a launcher behind it may have left its own.
    """
    variables = os.environ if environment is None else environment
    if variables.get(_FUJITSU_RANK, "").isdecimal() and variables.get(_FUJITSU_NODE_RANK, "").isdecimal():
        return LaunchedRank(int(variables[_FUJITSU_RANK]), None, (_FUJITSU_RANK, _FUJITSU_NODE_RANK))
    for rank, size in _RANK_VARIABLES:
        if variables.get(rank, "").isdecimal() and variables.get(size, "").isdecimal():
            return LaunchedRank(int(variables[rank]), int(variables[size]), (rank, size))
    return None


def ranks_of_node(environment: Optional[Mapping[str, str]] = None) -> int:
    """Return the number of ranks of this launch on this node; of all its ranks, where the launcher does not tell; 1
    where it tells neither, or there is none."""
    variables = os.environ if environment is None else environment
    launched = launched_rank(variables)
    if launched is None:
        return 1
    sizes = [int(variables[name]) for name in _NODE_SIZES if variables.get(name, "").isdecimal()]
    return max(1, sizes[0] if sizes else launched.ranks or 1)


def without_launch_variables(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables without those by which a launcher tells a process its place, so that a launcher which this
    process starts does not take itself for that rank. The user's settings stay, but for those of Open MPI's runtime and
    of MPICH's launcher."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS_PREFIXES)
        or not name.startswith((*_LAUNCH_PREFIXES, *_LAUNCHER_PREFIXES))
        and name not in _LAUNCH_VARIABLES
    }
