"""Orders of ``fugaku-gpt sim`` to a running simulator: faults and a report of its state."""

from __future__ import annotations

import json
import math
from typing import List

from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job import RUNNING, Job
from fugaku_gpt.simulator.job_manager import JobManager
from fugaku_gpt.simulator.protocol import Invocation, Reply

FAULTS = (
    "refuse [CODE [TIMES]]",
    "lose JOB|next [TIMES]",
    "unanswered [TIMES]",
    "node-down [JOB [NODE [SECONDS]]|next]",
    "slow-pjstat SECONDS",
    "pjstat-fails TIMES",
    "garbage [TIMES]",
    "clear",
)


def execute_order(invocation: Invocation, job_manager: JobManager) -> Reply:
    """Execute ``status``, ``ping`` or ``fault NAME ARGUMENT...``; ``status`` is JSON, an unknown order has code 2."""
    arguments = invocation.arguments
    if arguments[:1] == ["status"]:
        return Reply(out=json.dumps(_status_values(job_manager)) + "\n")
    if arguments[:1] == ["ping"]:
        return Reply()
    try:
        return _inject_fault(arguments[1:], job_manager)
    except (ValueError, IndexError):
        return Reply(err=f"{' '.join(arguments[1:])}: not a fault; valid are: {'; '.join(FAULTS)}\n", code=2)


def _status_values(job_manager: JobManager) -> "dict[str, object]":
    counts: "dict[str, int]" = {}
    for job in job_manager.table.top_level_jobs():
        counts[job.state] = counts.get(job.state, 0) + 1
    return {"jobs": counts, "faults": job_manager.faults.summary()}


def _inject_fault(arguments: List[str], job_manager: JobManager) -> Reply:
    name, parameters, faults = arguments[0], arguments[1:], job_manager.faults
    if name == "clear":
        job_manager.faults = Faults()
    elif name == "refuse":
        code = int(parameters[0]) if parameters else 71
        faults.refuse_code, faults.refuse_times = code, _times(parameters[1:])
    elif name == "lose":
        if parameters[0] == "next":
            faults.lose_times = _times(parameters[1:])
        else:
            for job in _jobs_of(parameters[0], job_manager):
                job_manager.lose_job(job)
    elif name == "unanswered":
        faults.unanswered_times = _times(parameters)
    elif name == "node-down":
        if parameters[:1] == ["next"]:
            faults.node_down_times = 1
        else:
            return _fail_node(parameters, job_manager)
    elif name == "slow-pjstat":
        faults.slow_seconds = float(parameters[0])
    elif name == "pjstat-fails":
        faults.fail_times = int(parameters[0])
    elif name == "garbage":
        faults.garbage_times = _times(parameters)
    else:
        raise ValueError(name)
    return Reply()


def _fail_node(parameters: List[str], job_manager: JobManager) -> Reply:
    """Fail a node: ``[JOB [NODE [SECONDS]]]``; of the first running job, where none is named.

    Raises:
        ValueError: there is no such job, or a number is malformed.
    """
    node = int(parameters[1]) if len(parameters) > 1 else 0
    seconds = float(parameters[2]) if len(parameters) > 2 else 0.0
    if len(parameters) > 3 or not 0 <= seconds < math.inf:
        raise ValueError(seconds)
    jobs = _jobs_of(parameters[0], job_manager) if parameters else list(job_manager.table.unfinished_jobs())
    running = [unit for job in jobs for unit in job_manager.table.execution_units(job) if unit.state == RUNNING]
    if not running:
        return Reply(err="there is no running job to fail\n", code=2)
    for job in running[:1] if not parameters else running:
        if not 0 <= node < job.request.nodes:
            return Reply(err=f"job {job.id} has nodes 0 to {job.request.nodes - 1}, and no node {node}\n", code=2)
        job_manager.fail_node(job, node, seconds)
    return Reply()


def _times(arguments: List[str]) -> int:
    return int(arguments[0]) if arguments else 1


def _jobs_of(job_id: str, job_manager: JobManager) -> List[Job]:
    """The jobs that an id names.

    Raises:
        ValueError: there are no such jobs.
    """
    jobs, _ = job_manager.table.resolve_ids(job_id)
    if not jobs:
        raise ValueError(job_id)
    return jobs
