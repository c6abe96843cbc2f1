"""The variables of a job: few, for a job inherits nothing from the shell that submitted it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Dict, Optional, Tuple

from fugaku_gpt.pjm.values import expand_path
from fugaku_gpt.simulator.job import BULK, STEP, Job
from fugaku_gpt.simulator.spool import Spool

MARKER = "FUGAKU_GPT_SIMULATOR"  # 1 in every process of a simulated job
MARK = "FUGAKU_GPT_SIMULATED_JOB"  # finds the processes of one job
PART = "FUGAKU_GPT_SIMULATOR_PART"  # in the stand-ins' own processes: no part of the job as the real machine has it
FOLDER = "FUGAKU_GPT_SIMULATOR_FOLDER"  # where a job's mpiexec leaves its notes
RANKS = "FUGAKU_GPT_SIMULATOR_RANKS"  # real processes that one mpiexec may start
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def job_folder(spool: Spool, job: Job) -> Path:
    """Where a job keeps its own files: temporary space, notes of its mpiexec."""
    return spool.folder(job.id)


def job_environment(spool: Spool, job: Job, max_ranks: int) -> Dict[str, str]:
    """Everything that a job's script sees.

    PATH holds the simulator's commands, the system's, and last the folder of this Python (on the real machine a
    script has to say where its Python is). What PJM computes wins over ``-x`` and ``-X``.
    """
    request = job.request
    found = {
        "PATH": f"{spool.bin}:{SYSTEM_PATH}:{Path(sys.executable).parent}",
        "HOME": os.path.expanduser("~"),
        "USER": job.user,
        "LOGNAME": job.user,
        "LANG": request.origin.get("LANG", "C"),
        "SHELL": request.origin.get("SHELL", "/bin/bash"),
    }
    found.update(request.environment)
    if str(spool.bin) not in found["PATH"].split(":"):
        found["PATH"] = f"{spool.bin}:{found['PATH']}"
    found.update(_pjm_variables(spool, job))
    found.update({MARKER: "1", MARK: job.mark, FOLDER: str(job_folder(spool, job)), RANKS: str(max_ranks)})
    return found


def _pjm_variables(spool: Spool, job: Job) -> Dict[str, str]:
    request = job.request
    folder = job_folder(spool, job)
    out, err = output_paths(job)
    found = {
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
        found["PJM_ADAPTIVE_ELAPSED_TIME_MIN"] = _seconds(request.elapse_min)
        found["PJM_ADAPTIVE_ELAPSED_TIME_MAX"] = _seconds(request.elapse_max)
    for axis, size in zip("XYZ", request.dims):
        found[f"PJM_NODE_{axis}"] = str(size)
    shape = request.mpi.get("shape")
    for axis, text in zip("XYZ", shape.split("x") if shape else map(str, request.dims)):
        found[f"PJM_MPI_SHAPE_{axis}"] = text
    if job.sub is not None:
        found["PJM_BULKNUM" if request.model == BULK else "PJM_STEPNUM"] = str(job.sub)
    bynode = "rank-map-bynode" in request.mpi
    axes = request.mpi.get("rank-map-bynode" if bynode else "rank-map-bychip")
    found["PJM_RANK_MAP_BYNODE" if bynode else "PJM_RANK_MAP_BYCHIP"] = axes or "1"
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
    found.update({key: value for key, value in optional.items() if value})
    for key, value in request.llio.items():
        found["PJM_LLIO_" + key.upper().replace("-", "_")] = value or "1"
    found.update({f"PJM_O_{key}": value for key, value in request.origin.items()})
    return found


def _seconds(value: Optional[int]) -> str:
    return "unlimited" if value is None else str(value)


def output_paths(job: Job) -> Tuple[str, str]:
    """(standard output, standard error), absolute."""
    request = job.request
    stem = f"{request.file_name}.{job.id}"
    return (
        file_path(job, request.out or f"{stem}.out"),
        file_path(job, request.err or f"{stem}.err"),
    )


def stats_path(job: Job) -> str:
    """The statistics file, absolute."""
    return file_path(job, job.request.stats_path or f"{job.request.file_name}.{job.id}.stats")


def file_path(job: Job, text: str) -> str:
    """A path with its metacharacters put in, below the folder of submission."""
    bulk = job.sub if job.request.model == BULK else None
    step = job.sub if job.request.model == STEP else None
    name = expand_path(text, str(job.number), job.request.name, job.id, bulk, step)
    return os.path.join(job.request.directory, name)
