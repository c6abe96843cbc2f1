"""Limits of the memory of this node's processes, and the memory in use.

The figures are read from ``/proc`` and the control groups' files alone, in some tens of microseconds, because the
memory guard reads them many times a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.machine.system import this_system

_SMALLEST_MARGIN, _LARGEST_MARGIN, _MARGIN_SHARE = 64 * 2**20, 512 * 2**20, 0.01
# by version of control groups: files of the limit and of the memory in use, name of the pages that are reclaimed first
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class MemoryUse:
    """Memory in use under one limit, in bytes.

    Attributes:
        source: name of what sets the limit.
        is_node_wide: whether all ranks of the node are under this limit.
    """

    used: int
    limit: int
    source: str
    is_node_wide: bool = True


@dataclass(frozen=True)
class ControlGroup:
    """A control group (version 1 or 2) with a limit of its own, and the files that have its memory in use."""

    limit: int
    usage: Path
    statistics: Path
    inactive: str

    def used(self) -> int:
        """Bytes in use, without pages of files that the kernel reclaims first."""
        usage = int(self.usage.read_text(encoding="ascii"))
        return usage - _fields(self.statistics, " ").get(self.inactive, 0)


def control_groups() -> List[ControlGroup]:
    """Control groups with a limit that contain this process, nested ones included."""
    groups: Dict[Path, ControlGroup] = {}
    for version, names in this_system().control_groups("memory"):
        limit_file, usage_file, inactive = _MEMORY_FILES[version]
        for folder in map(this_system().path, names):
            limit = _number(folder / limit_file)
            if limit is not None and folder not in groups:
                groups[folder] = ControlGroup(limit, folder / usage_file, folder / "memory.stat", inactive)
    machine_limit = machine_use().limit
    return [group for group in groups.values() if group.limit < machine_limit and _number(group.usage) is not None]


def machine_use() -> MemoryUse:
    """Memory in use of the machine, including swap space: the kernel kills processes when neither is left."""
    facts = {name: value * 1024 for name, value in _fields(this_system().path("proc/meminfo"), ":").items()}
    limit = facts["MemTotal"] + facts.get("SwapTotal", 0)
    return MemoryUse(limit - facts["MemAvailable"] - facts.get("SwapFree", 0), limit, "this machine")


def machine_memory() -> Tuple[int, int]:
    """Bytes of this machine's memory, and those of them that processes may still take, without swap space."""
    facts = _fields(this_system().path("proc/meminfo"), ":")
    return facts["MemTotal"] * 1024, facts["MemAvailable"] * 1024


def guard_margin(limit: int) -> int:
    """Bytes below a limit at which the memory guard ends a run."""
    return int(min(_LARGEST_MARGIN, max(_SMALLEST_MARGIN, _MARGIN_SHARE * limit)))


def private_and_shared_bytes(process: int) -> Tuple[int, int]:
    """(private, possibly shared) resident bytes of a process; (0, 0) if it has ended.

    Large pages of hugetlbfs, which Fujitsu's library gives every heap by default, are private: the kernel leaves them
    out of a process's resident pages.
    """
    try:
        pages = this_system().path(f"proc/{process}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0, 0
    page_bytes = this_system().page_bytes()
    resident, shared = int(pages[1]) * page_bytes, int(pages[2]) * page_bytes
    return resident - shared + hugetlb_bytes(process), shared


def hugetlb_bytes(process: int) -> int:
    """Bytes of a process in large pages of hugetlbfs; 0 if it has ended, or where the kernel does not report them."""
    text = this_system().read(f"proc/{process}/status") or ""
    reported = re.search(r"^HugetlbPages:\s*(\d+) kB$", text, re.MULTILINE)
    return int(reported[1]) * 1024 if reported else 0


def numa_node_use(nodes: Sequence[int]) -> Optional[MemoryUse]:
    """Memory in use of some NUMA nodes together, without pages of files, which the kernel reclaims; None where the
    system does not report it."""
    used = limit = 0
    for node in nodes:
        text = this_system().read(f"sys/devices/system/node/node{node}/meminfo") or ""
        kib = {name: int(number) for name, number in re.findall(r"^Node \d+ (\S+):\s*(\d+)", text, re.MULTILINE)}
        if not {"MemTotal", "MemFree"} <= set(kib):
            return None
        free = sum(kib.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        limit += kib["MemTotal"] * 1024
        used += (kib["MemTotal"] - free) * 1024
    if not nodes:
        return None
    names = f"NUMA node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
    return MemoryUse(used, limit, f"{names}, to which memory is bound", is_node_wide=False)


class NodeMemory:
    """The limits of this node's memory, and the memory that some of its processes use.

    Args:
        processes: process numbers of the ranks of this node.
        limit: bytes that these processes may use together; None: only the limits of the system apply.
    """

    def __init__(self, processes: Sequence[int], limit: Optional[int] = None) -> None:
        self._processes = list(processes)
        self._limit = limit
        self._groups = control_groups()
        # no page of this process comes from another node once these are full, whatever is free there
        self._memory_nodes = this_system().memory_nodes()

    def uses(self) -> List[MemoryUse]:
        """The memory in use under each limit; the limit with the least free memory is first."""
        uses = [machine_use()]
        uses += [MemoryUse(group.used(), group.limit, "its control group") for group in self._groups]
        own_nodes = numa_node_use(self._memory_nodes)
        if own_nodes is not None:
            uses.append(own_nodes)
        if self._limit is not None:
            sizes = [private_and_shared_bytes(process) for process in self._processes]
            used = sum(own for own, _ in sizes) + max((shared for _, shared in sizes), default=0)
            uses.append(MemoryUse(used, self._limit, "node.memory_limit"))
        return sorted(uses, key=lambda use: use.limit - use.used)

    def largest_process(self) -> int:
        """The process with the most private memory."""
        return max(self._processes, key=lambda process: private_and_shared_bytes(process)[0])


def _fields(path: Path, separator: str) -> Dict[str, int]:
    numbers = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(separator)
        number = value.split()[:1]
        if number and number[0].isdecimal():
            numbers[name] = int(number[0])
    return numbers


def _number(path: Path) -> Optional[int]:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None  # version 2 says "max" where there is no limit
