"""Makes a script for PJM of a job's specification."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from psij import InvalidJobException, JobSpec, ResourceSpecV1

from fugaku_gpt.jobs.tool_jobs import ToolScript, job_name
from fugaku_gpt.pjm.values import format_elapse

_PREFIX = "pjm."  # of custom attributes
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MIB = 2**20


def script_of(spec: JobSpec, launch_command: Sequence[str], output: Path) -> ToolScript:
    """Return the script of a job.

    Args:
        spec: what is asked for. A custom attribute ``pjm.OPTION`` is an option of ``pjsub``: ``pjm.L`` is ``-L``,
            ``pjm.llio`` is ``--llio``; the value True stands for an option without a value.
        launch_command: the command of the launcher, which starts the job's executable.
        output: file of what the launcher prints.

    Raises:
        InvalidJobException: something is asked for that PJM does not have.
    """
    options = [*_attribute_options(spec), *_resource_options(spec), ("-o", str(output)), ("-j", "")]
    if spec.inherit_environment:
        options.append(("-X", ""))
    options += _custom_options(spec)
    return ToolScript(job_name(Path(spec.name or "job").name), options, _commands(spec, launch_command))


def _attribute_options(spec: JobSpec) -> List[Tuple[str, str]]:
    attributes = spec.attributes
    if attributes is None:
        return []
    if attributes.reservation_id is not None:
        raise InvalidJobException(f"reservation_id {attributes.reservation_id!r}: PJM has no reservations of nodes")
    options = []
    if attributes.account:
        options.append(("-g", attributes.account))
    if attributes.queue_name:
        options.append(("-L", f"rscgrp={attributes.queue_name}"))
    duration: Optional[timedelta] = attributes.duration
    if duration is not None:
        options.append(("-L", f"elapse={format_elapse(max(1, round(duration.total_seconds())))}"))
    return options


def _resource_options(spec: JobSpec) -> List[Tuple[str, str]]:
    resources = spec.resources
    if resources is None:
        resources = ResourceSpecV1()
    if not isinstance(resources, ResourceSpecV1):
        raise InvalidJobException(f"resources of version {resources.version}: this executor knows version 1")
    if resources.gpu_cores_per_process:
        raise InvalidJobException(f"gpu_cores_per_process={resources.gpu_cores_per_process}: these nodes have no GPU")
    nodes = resources.computed_node_count
    options = [("-L", f"node={nodes}")]
    if resources.memory:
        options.append(("-L", f"node-mem={-(-resources.memory // (nodes * _MIB))}Mi"))
    processes = resources.computed_process_count
    if processes > 1:
        options.append(("--mpi", f"proc={processes}"))
        options.append(("--mpi", f"max-proc-per-node={resources.computed_processes_per_node}"))
    return options


def _custom_options(spec: JobSpec) -> List[Tuple[str, str]]:
    attributes = spec.attributes.custom_attributes if spec.attributes is not None else None
    options = []
    for key, value in (attributes or {}).items():
        if not key.lower().startswith(_PREFIX):
            continue  # of another executor
        name = key[len(_PREFIX) :]
        options.append((f"-{name}" if len(name) == 1 else f"--{name}", "" if value is True else str(value)))
    return options


def _commands(spec: JobSpec, launch_command: Sequence[str]) -> List[str]:
    commands = []
    for name, value in (spec.environment or {}).items():
        if not _VARIABLE.fullmatch(name):
            raise InvalidJobException(f"environment: {name!r} is not the name of a variable")
        commands.append(f"export {name}={shlex.quote(str(value))}")
    if spec.directory is not None:
        commands.append(f"cd {shlex.quote(str(spec.directory))} || exit")
    return [*commands, " ".join(shlex.quote(word) for word in launch_command)]
