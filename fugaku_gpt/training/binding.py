"""Binds each rank to cores of its own, and its memory to those cores, unless the launcher has done so.

On A64FX each of four ranks gets one core-memory group. Linux calls a group of cores and its memory a NUMA node.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from fugaku_gpt.comm import Communicator
from fugaku_gpt.machine.local import group_by_numa_node, numa_nodes_of
from fugaku_gpt.machine.system import this_system


def bind(world: Communicator, policy: str, threads: int) -> Dict[str, object]:
    """Bind this process as ``node.bind`` says; collective. Returns what took effect, for the start-up report.

    Nothing is bound if a launcher has bound the ranks already, or if there are not enough cores.
    """
    node = world.on_this_node("node")
    cores_by_rank = node.gather_json(this_system().affinity())
    common_cores: Optional[List[int]] = node.broadcast_json(
        cores_by_rank[0]
        if cores_by_rank is not None and all(cores == cores_by_rank[0] for cores in cores_by_rank)
        else None
    )
    if policy == "none":
        return {}
    if common_cores is None:
        return {"bound": "by the launcher"}
    if node.size * threads > len(common_cores):
        return {"bound": f"no: {node.size} ranks * {threads} threads are more than {len(common_cores)} cores"}
    own_cores = cores_for_rank(node.rank, node.size, threads, group_by_numa_node(common_cores))
    this_system().set_affinity(own_cores)
    if policy == "cores":
        return {"bound": "cores"}
    numa_nodes = numa_nodes_of(own_cores)
    return {"bound": "cores and memory" if numa_nodes and this_system().set_memory_nodes(numa_nodes) else "cores"}


def cores_for_rank(rank: int, ranks: int, threads: int, groups: Sequence[Sequence[int]]) -> List[int]:
    """Return the cores of the ``rank``-th of a node's ``ranks``. Groups are filled one after the other, and if all
    ranks fit that way, none straddles two groups.

    Args:
        groups: the node's cores by NUMA node.
    """
    capacities = [len(group) // threads for group in groups]
    if sum(capacities) >= ranks:
        for group, capacity in zip(groups, capacities):
            if rank < capacity:
                return list(group[rank * threads : (rank + 1) * threads])
            rank -= capacity
    flat = [core for group in groups for core in group]
    return flat[rank * threads : (rank + 1) * threads]
