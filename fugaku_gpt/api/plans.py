"""Plans: the memory of a run, the time of its iterations, and its fastest layouts, before anything is queued."""

from __future__ import annotations

from typing import Optional, Tuple

from fugaku_gpt.api.runs import Run
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.corpus_settings import load_for_plan
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.machine.constants import Machine, load_machine
from fugaku_gpt.planner import run_time
from fugaku_gpt.planner.run_time import TimePlan
from fugaku_gpt.planner.search import plan as search
from fugaku_gpt.planner.search.plan import TopologyPlan, TopologyRequest
from fugaku_gpt.planner.trainer import memory_plan
from fugaku_gpt.planner.trainer.memory_plan import MemoryPlan

__all__ = ["MemoryPlan", "TimePlan", "TopologyPlan", "TopologyRequest", "plan_memory", "plan_time", "plan_topology"]


def plan_memory(
    run: Run, *, machine: Optional[str] = None, node_memory: Optional[str] = None, torch: str = ""
) -> MemoryPlan:
    """Predict the memory of a run on every stage, and whether it fits, as ``fugaku-gpt plan memory`` does.

    Args:
        machine: name or file of a machine, or ``local``; default: that of the run's scheduler.
        node_memory: memory that the ranks of a node may use, such as ``23Gi``, in place of the machine's.
        torch: version of PyTorch; default: that of the machine.

    Raises:
        UsageError: there is no such machine, or the run is not valid.
    """
    config = _planned(run, check=True)
    return memory_plan.plan_memory(config, memory_plan.chosen_node_limits(config, machine, node_memory, torch))


def plan_time(
    run: Run,
    *,
    machine: str = "a64fx",
    hardware: Optional[str] = None,
    torch: str = "",
    watts: Optional[float] = None,
) -> TimePlan:
    """Predict an iteration of a run, each figure with an 80 % interval, as ``fugaku-gpt plan time`` does.

    Args:
        machine: name of a machine, or its file.
        hardware: kind of the machine's hardware; default: its first.
        torch: the PyTorch build, such as ``1.10``, where the machine's rows distinguish builds.
        watts: power of a node, for the energy.

    Raises:
        UsageError: no run can have this shape on these nodes, or the machine has counted cycles alone.
    """
    machine_data = load_machine(machine)
    run_time.refuse_choices(machine, machine_data, hardware, torch)
    return run_time.plan_time(_planned(run), machine_data, hardware, torch, watts)


def plan_topology(
    run: Run,
    request: TopologyRequest,
    *,
    machine: str = "a64fx",
    hardware: Optional[str] = None,
    torch: str = "",
) -> TopologyPlan:
    """Search the fastest layouts of a run among all that fit, as ``fugaku-gpt plan topology`` does.

    Args:
        request: the nodes, and what layouts must meet.
        machine: name of a machine of measured rows, or its file.
        hardware: kind of the machine's hardware; default: its first.
        torch: the PyTorch build, such as ``1.10``, where the machine's rows distinguish builds.

    Raises:
        UsageError: the request or the machine is not valid.
        RunFailed: no layout fits, or none is valid.
    """
    request.check()
    config, machine_data = _searched(run, machine)
    plan = search.plan_topology(config, machine_data, request, hardware, torch)
    if plan.failure:
        raise RunFailed(plan.failure)
    return plan


def _searched(run: Run, machine: str) -> Tuple[RunConfig, Machine]:
    machine_data = load_machine(machine)
    search.require_searchable(machine, machine_data)
    return search.with_searched_clock(_planned(run), machine_data)[0], machine_data


def _planned(run: Run, check: bool = False) -> RunConfig:
    return load_for_plan(run.source, check=check)[0]
