"""Each rank on cores of its own, and its memory beside them, where the launcher has not seen to it.

On A64FX that is a core-memory group for each of four ranks. Linux calls a group of cores and its memory a NUMA node.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from fugaku_gpt.comm import Communicator

_BIND = 2  # MPOL_BIND of linux/mempolicy.h
_FLAGS = 0xE000  # that MPOL_BIND may come with
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_LARGEST_NODES = 1024  # bits of the mask that is handed to the kernel


def bind(world: Communicator, how: str, threads: int) -> Dict[str, object]:
    """Bind this process as ``node.bind`` says; collective. Returns what took effect, for the start-up report.

    Nothing is bound where a launcher has bound the ranks already, or where there are not enough cores.
    """
    node = world.on_this_node("node")
    everyone = node.gather_json(sorted(os.sched_getaffinity(0)))
    alike: Optional[List[int]] = node.broadcast_json(
        everyone[0] if everyone is not None and all(cores == everyone[0] for cores in everyone) else None
    )
    if how == "none":
        return {}
    if alike is None:
        return {"bound": "by the launcher"}
    if node.size * threads > len(alike):
        return {"bound": f"no: {node.size} ranks * {threads} threads are more than {len(alike)} cores"}
    mine = cores_of(node.rank, node.size, threads, by_numa_node(alike))
    os.sched_setaffinity(0, mine)
    if how == "cores":
        return {"bound": "cores"}
    wanted = numa_nodes_of(mine)
    return {"bound": "cores and memory" if wanted and set_memory_nodes(wanted) else "cores"}


def cores_of(rank: int, ranks: int, threads: int, groups: Sequence[Sequence[int]]) -> List[int]:
    """The cores of the ``rank``-th of a node's ``ranks``: groups are filled one after the other, and where all ranks
    fit that way, none straddles two groups.

    Args:
        groups: the node's cores by NUMA node.
    """
    within = [len(group) // threads for group in groups]
    if sum(within) >= ranks:
        for group, room in zip(groups, within):
            if rank < room:
                return list(group[rank * threads : (rank + 1) * threads])
            rank -= room
    flat = [core for group in groups for core in group]
    return flat[rank * threads : (rank + 1) * threads]


def by_numa_node(cores: Sequence[int]) -> List[List[int]]:
    """Cores grouped by the NUMA node that they are on; one group where the system does not tell."""
    groups: Dict[int, List[int]] = {}
    for core in cores:
        node = _numa_node_of(core)
        groups.setdefault(-1 if node is None else node, []).append(core)
    return [groups[node] for node in sorted(groups)]


def numa_nodes_of(cores: Sequence[int]) -> List[int]:
    """The NUMA nodes of some cores; empty where the system does not tell."""
    return sorted({node for node in map(_numa_node_of, cores) if node is not None})


def set_memory_nodes(nodes: Sequence[int]) -> bool:
    """Have this process's new pages come from these NUMA nodes only; False where the kernel refuses."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_ulong * (_LARGEST_NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(ctypes.c_long(number), ctypes.c_int(_BIND), words, ctypes.c_ulong(_LARGEST_NODES))) == 0


def memory_nodes() -> List[int]:
    """The NUMA nodes from which alone this process's new pages come, as the kernel says, whoever has bound it; empty
    where it is bound to none."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return []
    how, words = ctypes.c_int(), (ctypes.c_ulong * (_LARGEST_NODES // 64))()
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(_LARGEST_NODES)
    failed = libc.syscall(ctypes.c_long(number), ctypes.byref(how), words, size, None, ctypes.c_ulong(0))
    if failed or how.value & ~_FLAGS != _BIND:
        return []
    return [node for node in range(_LARGEST_NODES) if words[node // 64] >> (node % 64) & 1]


def _numa_node_of(core: int) -> Optional[int]:
    for path in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*"):
        return int(path.name[4:])
    return None
