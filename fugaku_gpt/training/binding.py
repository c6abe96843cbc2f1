"""Binds each rank to cores of its own, and its memory to those cores, unless the launcher has done so.

On A64FX each of four ranks gets one core-memory group. Linux calls a group of cores and its memory a NUMA node.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Dict, List, Optional, Sequence

from fugaku_gpt.comm import Communicator
from fugaku_gpt.machine.local import group_by_numa_node, numa_nodes_of

_MPOL_BIND = 2  # MPOL_BIND of linux/mempolicy.h
_POLICY_FLAGS = 0xE000  # mode flags that MPOL_BIND may come with
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MASK_BITS = 1024  # of the node mask that the kernel is given


def bind(world: Communicator, policy: str, threads: int) -> Dict[str, object]:
    """Bind this process as ``node.bind`` says; collective. Returns what took effect, for the start-up report.

    Nothing is bound if a launcher has bound the ranks already, or if there are not enough cores.
    """
    node = world.on_this_node("node")
    cores_by_rank = node.gather_json(sorted(os.sched_getaffinity(0)))
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
    os.sched_setaffinity(0, own_cores)
    if policy == "cores":
        return {"bound": "cores"}
    numa_nodes = numa_nodes_of(own_cores)
    return {"bound": "cores and memory" if numa_nodes and set_memory_nodes(numa_nodes) else "cores"}


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


def set_memory_nodes(nodes: Sequence[int]) -> bool:
    """Have this process's new pages come from these NUMA nodes only; False if the kernel refuses."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_BIND), mask, ctypes.c_ulong(_MASK_BITS))) == 0


def memory_nodes() -> List[int]:
    """Return the NUMA nodes to which the kernel has bound this process's new pages, whoever asked for it; empty if the
    memory is not bound."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return []
    policy, mask = ctypes.c_int(), (ctypes.c_ulong * (_MASK_BITS // 64))()
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(_MASK_BITS)
    failed = libc.syscall(ctypes.c_long(number), ctypes.byref(policy), mask, size, None, ctypes.c_ulong(0))
    if failed or policy.value & ~_POLICY_FLAGS != _MPOL_BIND:
        return []
    return [node for node in range(_MASK_BITS) if mask[node // 64] >> (node % 64) & 1]
