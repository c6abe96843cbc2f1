"""Wrapper of one rank under the stand-in for ``mpiexec``: it gives the rank the output files and the variables that it
has on Fugaku, and runs the program."""

from __future__ import annotations

import json
import os
import sys
from typing import Dict, List, Mapping, Sequence

# variables in which Open MPI and MPICH give a process its rank
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
# The variables of a launcher by which MPI joins its ranks (PMIx: Open MPI; PMI: MPICH) and finds its libraries. Open
# MPI 4 joins no ranks without the address of their daemon.
_JOINING_PREFIXES = ("PMIX_", "PMI_")
_JOINING_VARIABLES = ("OMPI_MCA_orte_local_daemon_uri", "LD_LIBRARY_PATH")


def main(plan_file: str, segment: str, argv: List[str]) -> None:
    """Replace this process by the program; exit with code 127 if it cannot be started."""
    with open(plan_file, encoding="utf-8", errors="surrogateescape") as stream:
        plan = json.load(stream)
    rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
    paths: Dict[str, str] = plan["files"][str(rank)]
    streams = {
        0: os.open(plan["stdin"] or os.devnull, os.O_RDONLY),
        1: _open(paths["out"]),
    }
    streams[2] = streams[1] if paths["err"] == paths["out"] else _open(paths["err"])
    for target, source in streams.items():
        os.dup2(source, target)
    with open(os.path.join(plan["folder"], f"rank.{rank}"), "w", encoding="ascii") as stream:
        stream.write(str(os.getpid()))
    environment = rank_environment(os.environ, plan["variables"])
    environment.update(plan["environment"][int(segment)])
    environment["PMIX_RANK"] = str(rank)
    environment["PLE_RANK_ON_NODE"] = str(plan["rank_on_node"][rank])
    environment["FUGAKU_GPT_SIMULATOR_NODE"] = str(plan["nodes"][rank])  # NODE_VARIABLE, whose module is not here
    if plan["directory"]:
        os.chdir(plan["directory"])
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def rank_environment(environment: Mapping[str, str], job_variables: Sequence[str]) -> Dict[str, str]:
    """Return what a rank keeps of the variables that its launcher has given it: the job's own, and those by which MPI
    joins the ranks. Fujitsu's ``mpiexec`` sets none of the others, such as the number of ranks.

    Args:
        environment: the variables of this process.
        job_variables: names of the variables that the job has set.
    """
    passed_names = {*job_variables, *_JOINING_VARIABLES}
    return {
        name: value for name, value in environment.items() if name in passed_names or name.startswith(_JOINING_PREFIXES)
    }


def _open(path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
