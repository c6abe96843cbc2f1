"""Whether a run fits into the memory of its nodes, and the smallest change that makes it fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Optional, Tuple

from fugaku_gpt.config.schema import SIZE, RunConfig
from fugaku_gpt.config.values import size_bytes
from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.trainer.memory_check import NodeLimits
from fugaku_gpt.planner.trainer.node_limits import job_node_limits, machine_node_limits
from fugaku_gpt.planner.trainer.run_memory import RunMemory
from fugaku_gpt.planner.trainer.shrink import smallest_change


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run on its nodes.

    Attributes:
        node: the nodes, with the limits of their memory.
        memory: bytes by category, on a rank of each stage and on the fullest node.
        limit: (bytes that the ranks of a node may use, source of the limit); None if no limit is known.
        change: settings that make a run fit which does not, those that slow it down least: (key, value); empty if it
            fits, or if no change of layout, batch and recompute does.
    """

    node: NodeLimits
    memory: RunMemory
    limit: Optional[Tuple[int, str]]
    change: Tuple[Tuple[str, str], ...] = ()

    @property
    def needed_bytes(self) -> int:
        """Bytes that the ranks of the fullest node need."""
        return self.memory.bytes_of_node

    @property
    def does_fit(self) -> bool:
        """Whether the run fits; True where no limit is known."""
        return self.limit is None or self.needed_bytes <= self.limit[0]


def chosen_node_limits(
    config: RunConfig, machine: Optional[str] = None, node_memory: Optional[str] = None, torch: str = ""
) -> NodeLimits:
    """The nodes that a run is planned for.

    Args:
        machine: name or file of a machine, or ``local``; None for that of the run's scheduler.
        node_memory: memory that the ranks of a node may use, such as 23Gi, in place of the machine's.
        torch: version of PyTorch; empty for that of the machine.

    Raises:
        UsageError: there is no such machine, or a text is not valid.
    """
    node = machine_node_limits(machine, torch) if machine is not None else job_node_limits(config, torch)
    if node_memory is None:
        return node
    pattern, description = SIZE
    if not re.fullmatch(pattern, node_memory):
        raise UsageError(f"--node-memory {node_memory}: valid: {description}")
    return replace(node, limits=((size_bytes(node_memory), "--node-memory"),))


def plan_memory(config: RunConfig, node: NodeLimits) -> MemoryPlan:
    """Predict the memory of a run, and search a change where it does not fit."""
    memory, limit = node.run_memory(config), node.smallest_limit(config)
    plan = MemoryPlan(node, memory, limit)
    if limit is None or plan.does_fit:
        return plan
    change = smallest_change(config, node.run_memory, limit[0], node.has_more_nodes)
    return replace(plan, change=tuple(change or ()))
