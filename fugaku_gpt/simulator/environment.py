"""Environment variables of a job; it inherits nothing from the shell that submitted it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Dict, Optional, Tuple

from fugaku_gpt.pjm.values import expand_path
from fugaku_gpt.simulator.job import BULK, STEP, Job
from fugaku_gpt.simulator.spool import Spool

SIMULATED_VARIABLE = "FUGAKU_GPT_SIMULATOR"  # set to 1 in every process of a simulated job
JOB_MARK_VARIABLE = "FUGAKU_GPT_SIMULATED_JOB"  # identifies the processes of one job
STAND_IN_VARIABLE = "FUGAKU_GPT_SIMULATOR_PART"  # set in processes of the stand-ins, which a real job does not have
FOLDER_VARIABLE = "FUGAKU_GPT_SIMULATOR_FOLDER"  # folder of the files that a job's mpiexec writes
NODE_VARIABLE = "FUGAKU_GPT_SIMULATOR_NODE"  # number, in its job, of the node that a rank is on
MAX_RANKS_VARIABLE = "FUGAKU_GPT_SIMULATOR_RANKS"  # number of real processes that one mpiexec may start
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def job_folder(spool: Spool, job: Job) -> Path:
    """The folder of a job's own files: temporary space and files of its mpiexec."""
    return spool.job_folder(job.id)


def job_environment(spool: Spool, job: Job, max_ranks: int) -> Dict[str, str]:
    """All variables of a job's script.

    PATH has the simulator's commands, the system's, and last the folder of this Python (on the real machine a script
    has to name its Python). Variables that PJM sets override those of ``-x`` and ``-X``.
    """
    request = job.request
    variables = {
        "PATH": f"{spool.bin}:{SYSTEM_PATH}:{Path(sys.executable).parent}",
        "HOME": os.path.expanduser("~"),
        "USER": job.user,
        "LOGNAME": job.user,
        "LANG": request.origin.get("LANG", "C"),
        "SHELL": request.origin.get("SHELL", "/bin/bash"),
    }
    variables.update(request.environment)
    if str(spool.bin) not in variables["PATH"].split(":"):
        variables["PATH"] = f"{spool.bin}:{variables['PATH']}"
    variables.update(_pjm_variables(spool, job))
    variables.update(
        {
            SIMULATED_VARIABLE: "1",
            JOB_MARK_VARIABLE: job.mark,
            FOLDER_VARIABLE: str(job_folder(spool, job)),
            MAX_RANKS_VARIABLE: str(max_ranks),
        }
    )
    return variables


def _pjm_variables(spool: Spool, job: Job) -> Dict[str, str]:
    request = job.request
    folder = job_folder(spool, job)
    out, err = output_paths(job)
    variables = {
        "PJM_ENVIRONMENT": "BATCH",
        "PJM_JOBID": str(job.number),
        "PJM_SUBJOBID": job.id,
        "PJM_JOBNAME": request.name,
        "PJM_JOBDIR": request.directory,
        "PJM_RSCUNIT": request.rscunit,
        "PJM_RSCGRP": request.rscgrp,
        "PJM_CUSTOM_RESOURCES": ",".join(f"{key}={value}" for key, value in request.custom.items()),
        "PJM_DPREFIX": "#PJM",
        "PJM_ELAPSE_LIMIT": _seconds(request.elapse_max),
        "PJM_ELAPSED_TIME_MODE": "adaptive" if request.ranged else "fixed",
        "PJM_NODE": str(request.nodes),
        "PJM_NODE_ALLOCATION_MODE": request.allocation,
        "PJM_MPI_PROC": str(request.processes),
        "PJM_PROC_BY_NODE": str(request.processes_per_node),
        "PJM_NORESTART": "0" if request.restart else "1",
        "PJM_SHELL": request.interpreter[0],
        "PJM_STDOUT_PATH": out,
        "PJM_STDERR_PATH": out if request.join else err,
        "PJM_LOCALTMP": str(folder / "localtmp"),
        "PJM_SHAREDTMP": str(folder / "sharedtmp"),
    }
    if request.ranged:
        variables["PJM_ADAPTIVE_ELAPSED_TIME_MIN"] = _seconds(request.elapse_min)
        variables["PJM_ADAPTIVE_ELAPSED_TIME_MAX"] = _seconds(request.elapse_max)
    for axis, size in zip("XYZ", request.dims):
        variables[f"PJM_NODE_{axis}"] = str(size)
    shape = request.mpi.get("shape")
    for axis, text in zip("XYZ", shape.split("x") if shape else map(str, request.dims)):
        variables[f"PJM_MPI_SHAPE_{axis}"] = text
    if job.sub is not None:
        variables["PJM_BULKNUM" if request.model == BULK else "PJM_STEPNUM"] = str(job.sub)
    bynode = "rank-map-bynode" in request.mpi
    axes = request.mpi.get("rank-map-bynode" if bynode else "rank-map-bychip")
    variables["PJM_RANK_MAP_BYNODE" if bynode else "PJM_RANK_MAP_BYCHIP"] = axes or "1"
    optional = {
        "PJM_NODE_MEM_LIMIT": request.resources.get("node-mem"),
        "PJM_COMMENT": request.comment,
        "PJM_APPNAME": request.appname,
        "PJM_FSNAME": request.fs,
        "PJM_NET_ROUTE": request.net_route,
        "PJM_MAILOPTION": request.mail,
        "PJM_MAILSENDTO": request.mail_list,
        "PJM_ASSIGN_ONLINE_NODE": "1" if "assign-online-node" in request.mpi else "",
    }
    variables.update({key: value for key, value in optional.items() if value})
    for key, value in request.llio.items():
        variables["PJM_LLIO_" + key.upper().replace("-", "_")] = value or "1"
    variables.update({f"PJM_O_{key}": value for key, value in request.origin.items()})
    return variables


def _seconds(value: Optional[int]) -> str:
    return "unlimited" if value is None else str(value)


def output_paths(job: Job) -> Tuple[str, str]:
    """Absolute paths of standard output and standard error."""
    request = job.request
    stem = f"{request.file_name}.{job.id}"
    return (
        file_path(job, request.out or f"{stem}.out"),
        file_path(job, request.err or f"{stem}.err"),
    )


def stats_path(job: Job) -> str:
    """Absolute path of the statistics file."""
    return file_path(job, job.request.stats_path or f"{job.request.file_name}.{job.id}.stats")


def file_path(job: Job, text: str) -> str:
    """A path with its metacharacters expanded, relative to the folder of submission."""
    bulk = job.sub if job.request.model == BULK else None
    step = job.sub if job.request.model == STEP else None
    name = expand_path(text, str(job.number), job.request.name, job.id, bulk, step)
    return os.path.join(job.request.directory, name)
