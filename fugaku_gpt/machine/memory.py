"""How much memory this node's processes may use, by whatever sets a limit, and how much of it is in use.

Read from ``/proc`` and the control groups' files only, in some tens of microseconds: it is asked many times a second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

_GROUPS = Path("/sys/fs/cgroup")
_SMALLEST_MARGIN, _LARGEST_MARGIN, _MARGIN_SHARE = 64 * 2**20, 512 * 2**20, 0.01
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MemoryUse:
    """Memory in use under one limit, in bytes.

    Attributes:
        source: what sets the limit.
    """

    used: int
    limit: int
    source: str


@dataclass(frozen=True)
class ControlGroup:
    """A control group with a limit of its own, and the files that tell what is in use (version 1 or 2)."""

    limit: int
    usage: Path
    statistics: Path
    inactive: str

    def used(self) -> int:
        """Without pages of files that the kernel takes back first."""
        usage = int(self.usage.read_text(encoding="ascii"))
        return usage - _fields(self.statistics, " ").get(self.inactive, 0)


def control_groups(root: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> List[ControlGroup]:
    """Those that this process is in and that have a limit: its own, and the ones around it."""
    groups: Dict[Path, ControlGroup] = {}
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # a system without them
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            top = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        limit_file, usage_file, inactive = names
        # in a container the path may be the host's, and its files be at the top
        folders = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(folders) + 1):
            folder = top.joinpath(*folders[:depth])
            limit = _number(folder / limit_file)
            if limit is not None and folder not in groups:
                groups[folder] = ControlGroup(limit, folder / usage_file, folder / "memory.stat", inactive)
    machine_limit = machine_use().limit
    return [group for group in groups.values() if group.limit < machine_limit and _number(group.usage) is not None]


def machine_use() -> MemoryUse:
    """Of the whole machine, swap space included: the kernel kills where neither is left."""
    facts = {name: value * 1024 for name, value in _fields(Path("/proc/meminfo"), ":").items()}
    limit = facts["MemTotal"] + facts.get("SwapTotal", 0)
    return MemoryUse(limit - facts["MemAvailable"] - facts.get("SwapFree", 0), limit, "this machine")


def guard_margin(limit: int) -> int:
    """How near to a limit is too near, in bytes: there the memory guard ends a run."""
    return int(min(_LARGEST_MARGIN, max(_SMALLEST_MARGIN, _MARGIN_SHARE * limit)))


def private_and_shared_bytes(process: int) -> Tuple[int, int]:
    """(memory of its own, memory that it may share with others) of a process, resident; (0, 0) of one that is gone."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0, 0
    resident, shared = int(pages[1]) * _PAGE, int(pages[2]) * _PAGE
    return resident - shared, shared


class NodeMemory:
    """The limits of this node, and how near to them some processes of it are.

    Args:
        processes: the ranks of this node, by their process numbers.
        limit: bytes that they may use together; None for the limits of the system alone.
    """

    def __init__(self, processes: Sequence[int], limit: Optional[int] = None) -> None:
        self._processes = list(processes)
        self._limit = limit
        self._groups = control_groups()

    def uses(self) -> List[MemoryUse]:
        """Of each limit, the one first that has least room left."""
        uses = [machine_use()]
        uses += [MemoryUse(group.used(), group.limit, "its control group") for group in self._groups]
        if self._limit is not None:
            sizes = [private_and_shared_bytes(process) for process in self._processes]
            used = sum(own for own, _ in sizes) + max((shared for _, shared in sizes), default=0)
            uses.append(MemoryUse(used, self._limit, "node.memory_limit"))
        return sorted(uses, key=lambda use: use.limit - use.used)

    def largest_process(self) -> int:
        """The process that has most of its own."""
        return max(self._processes, key=lambda process: private_and_shared_bytes(process)[0])


def _fields(path: Path, separator: str) -> Dict[str, int]:
    numbers = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(separator)
        number = value.split()[:1]
        if number and number[0].isdigit():
            numbers[name] = int(number[0])
    return numbers


def _number(path: Path) -> Optional[int]:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None  # version 2 says "max" where there is no limit
