"""The nodes that a run is planned for, where these are not this machine: from a machine's data file."""

from __future__ import annotations

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine import fugaku
from fugaku_gpt.machine.constants import LOCAL, UNIT_BYTES, Machine, load_machine
from fugaku_gpt.machine.framework import Framework, framework_of
from fugaku_gpt.planner.trainer.memory_check import NodeLimits, local_node_limits, refuse_too_large
from fugaku_gpt.planner.trainer.run_memory import MIB

FUGAKU = "a64fx"
A64FX = "A64FX"


def machine_node_limits(name: str, torch: str = "") -> NodeLimits:
    """A machine by name or file; ``local`` is this one.

    Args:
        torch: version of PyTorch, for this machine and others that were probed; default: what was found there.

    Raises:
        UsageError: there is no such machine, its memory is not that of nodes, or it does not tell builds apart.
    """
    if name == LOCAL:
        return local_node_limits(torch)
    machine = load_machine(name)
    if machine.memory_of != "node":
        raise UsageError(f"--machine {name}: its memory is that of accelerators; this trainer runs on a node's cores")
    if torch and machine.probed is None:
        raise UsageError(f"--torch {torch}: memory on {name} is by rows of other trainers, which tell no builds apart")
    return hardware_node_limits(machine, next(iter(machine.hardware)), torch)


def hardware_node_limits(machine: Machine, hardware: str, torch: str = "") -> NodeLimits:
    """Nodes of a machine whose memory is that of nodes, and of one kind of its hardware.

    What a rank takes before it has a model is that of the PyTorch that was probed there; where other trainers' rows are
    all there is, it is theirs.
    """
    unit, values = UNIT_BYTES[machine.memory_unit], machine.memory.values
    size, system = int(machine.capacity(hardware) * unit), int(values.get("system", 0.0) * unit)
    limits = [(size - system, f"{hardware}, less the system's {system // MIB} MiB" if system else hardware)]
    if machine.probed is not None:
        framework = framework_of(torch or machine.probed.facts.get("torch", ""))
        return NodeLimits(tuple(limits), framework, machine.probed.cores)
    cores = 1
    if hardware.startswith(A64FX):
        limits.append((fugaku.JOB_BYTES, "what a job may ask for of Fugaku's nodes"))
        cores = fugaku.CORES
    base = int((values["base"] + values.get("communication", 0.0)) * unit)
    return NodeLimits(tuple(limits), Framework(base, 0, source=f"rows of {machine.name}"), cores)


def job_node_limits(config: RunConfig, torch: str = "") -> NodeLimits:
    """The nodes of a job, as far as its scheduler says what they are.

    Raises:
        UsageError: as :func:`place_of_machine`.
    """
    if config.job.scheduler == "slurm":
        return NodeLimits((), framework_of(torch), 1)
    return machine_node_limits(FUGAKU if config.job.scheduler == "pjm" else LOCAL, torch)


def refuse_job_too_large(config: RunConfig) -> None:
    """Refuse the job of a run that does not fit its nodes, where these are known.

    Raises:
        UsageError: as :func:`fugaku_gpt.planner.trainer.memory_check.refuse_too_large`.
    """
    if config.node.memory_check:
        refuse_too_large(config, job_node_limits(config))
