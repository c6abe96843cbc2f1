"""Memory limits of nodes of other machines, from their data files."""

from __future__ import annotations

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine import fugaku
from fugaku_gpt.machine.constants import FUGAKU_HARDWARE, LOCAL, UNIT_BYTES, Machine, load_machine
from fugaku_gpt.machine.framework import Framework, framework_of
from fugaku_gpt.planner.trainer.memory_check import NodeLimits, local_node_limits, refuse_too_large
from fugaku_gpt.planner.trainer.run_memory import MIB

FUGAKU = "a64fx"


def machine_node_limits(name: str, torch: str = "") -> NodeLimits:
    """The limits of a machine by name or file; ``local`` is this machine.

    Args:
        torch: version of PyTorch, for this machine and others that were probed; default: the version that the probe ran
            with.

    Raises:
        UsageError: there is no such machine, its memory is not that of nodes, or its rows do not distinguish builds.
    """
    if name == LOCAL:
        return local_node_limits(torch)
    machine = load_machine(name)
    if machine.memory_of != "node":
        raise UsageError(f"--machine {name}: its memory is that of accelerators; this trainer runs on a node's cores")
    if torch and machine.probed is None:
        raise UsageError(
            f"--torch {torch}: memory on {name} is from rows of other trainers, which do not distinguish builds"
        )
    return hardware_node_limits(machine, next(iter(machine.hardware)), torch)


def hardware_node_limits(machine: Machine, hardware: str, torch: str = "") -> NodeLimits:
    """The limits of one kind of hardware of a machine whose memory is that of nodes.

    The memory of a rank before it has a model is that of the PyTorch that was probed there; without a probe, it is that
    of other trainers' rows.
    """
    unit, values = UNIT_BYTES[machine.memory_unit], machine.memory.values
    size, system = int(machine.capacity(hardware) * unit), int(values.get("system", 0.0) * unit)
    limits = [(size - system, f"{hardware}, less the system's {system // MIB} MiB" if system else hardware)]
    if machine.probed is not None:
        framework = framework_of(torch or machine.probed.facts.get("torch", ""))
        return NodeLimits(tuple(limits), framework, machine.probed.cores)
    cores = 1
    if hardware.startswith(FUGAKU_HARDWARE):
        limits.append((fugaku.JOB_BYTES, "what a job may ask for of Fugaku's nodes"))
        cores = fugaku.CORES
    base = int((values["base"] + values.get("communication", 0.0)) * unit)
    return NodeLimits(tuple(limits), Framework(base, 0, source=f"rows of {machine.name}"), cores)


def job_node_limits(config: RunConfig, torch: str = "") -> NodeLimits:
    """The limits of a job's nodes, as far as its scheduler determines them.

    Raises:
        UsageError: see :func:`machine_node_limits`.
    """
    if config.job.scheduler == "slurm":
        return NodeLimits((), framework_of(torch), 1)
    return machine_node_limits(FUGAKU if config.job.scheduler == "pjm" else LOCAL, torch)


def refuse_job_too_large(config: RunConfig) -> None:
    """Refuses the job of a run that does not fit its nodes, if these are known.

    Raises:
        UsageError: see :func:`fugaku_gpt.planner.trainer.memory_check.refuse_too_large`.
    """
    if config.node.memory_check:
        refuse_too_large(config, job_node_limits(config))
