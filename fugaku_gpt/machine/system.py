"""Reads what the operating system reports of this node: files under ``/proc`` and ``/sys``, answers of system calls.

All code that depends on them asks :func:`this_system`, so that its decisions can be tried for a node of another kind:
:func:`use_system` puts a recorded one in the place of this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.machine.rank import launched_rank

_MPOL_BIND = 2  # MPOL_BIND of linux/mempolicy.h
_POLICY_FLAGS = 0xE000  # mode flags that MPOL_BIND may come with
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MASK_BITS = 1024  # of the node mask that the kernel is given


class System:
    """The system that this process runs on.

    Args:
        root: folder that has ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def path(self, name: str) -> Path:
        """The path of a file of the kernel by its name below the root, such as ``proc/meminfo``."""
        return self._root / name

    def read(self, name: str) -> Optional[str]:
        """The text of a file of the kernel without white space around it; None where it is absent or not readable."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # absent on this kernel, or not readable: the fact is unknown
            return None

    def read_numbers(self, name: str) -> List[int]:
        """The numbers in a file of the kernel that lists cores or nodes, such as ``0-1,12-59``; empty where it is
        absent."""
        return _numbers(self.read(name) or "")

    def architecture(self) -> str:
        """Name of the processor's architecture, such as ``aarch64``."""
        return platform.machine()

    def page_bytes(self) -> int:
        """Bytes of a page of memory."""
        return int(os.sysconf("SC_PAGE_SIZE"))

    def affinity(self) -> List[int]:
        """Numbers of the cores that this thread may run on."""
        return sorted(os.sched_getaffinity(0))

    def launcher_affinity(self) -> List[int]:
        """Numbers of the cores that the process that started this rank may run on; empty where that is not reported.

        A script between launcher and rank, which waits for the rank, is no launcher: it has the rank's cores and the
        variables of the rank's launch.
        """
        process, own = os.getppid(), self.affinity()
        while True:
            status = self.read(f"proc/{process}/status") or ""
            allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
            cores = _numbers(allowed[1]) if allowed else []
            parent = re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)
            if cores != own or parent is None or parent[1] == "0" or not self._is_rank(process):
                return cores
            process = int(parent[1])

    def _is_rank(self, process: int) -> bool:
        """Whether a launcher has started a process as a rank, by the variables that it was started with."""
        settings = (self.read(f"proc/{process}/environ") or "").split("\0")
        return launched_rank(dict(setting.split("=", 1) for setting in settings if "=" in setting)) is not None

    def control_groups(self, controller: str) -> List[Tuple[int, List[str]]]:
        """The control groups of this process for a controller, such as ``memory``: (version, folders by their names
        below the root, from the outermost group to the process's own)."""
        groups = []
        for line in (self.read("proc/self/cgroup") or "").splitlines():  # none: a system without control groups
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                version, top = 2, "sys/fs/cgroup"
            elif controller in controllers.split(","):
                version, top = 1, f"sys/fs/cgroup/{controller}"
            else:
                continue
            # in a container the path may be the host's, and the files at the top
            names = [name for name in path.split("/") if name and name != ".."]
            groups.append((version, ["/".join([top, *names[:depth]]) for depth in range(len(names) + 1)]))
        return groups

    def set_affinity(self, cores: Iterable[int]) -> None:
        """Let this thread, and those that it starts, run on these cores only.

        Raises:
            OSError: the kernel refuses.
        """
        os.sched_setaffinity(0, cores)

    def set_memory_nodes(self, nodes: Sequence[int]) -> bool:
        """Have this process's new pages come from these NUMA nodes only; False if the kernel refuses."""
        number = _SET_MEMPOLICY.get(self.architecture())
        if number is None:
            return False
        mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
        for node in nodes:
            mask[node // 64] |= 1 << (node % 64)
        libc = ctypes.CDLL(None, use_errno=True)
        return int(libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_BIND), mask, ctypes.c_ulong(_MASK_BITS))) == 0

    def memory_nodes(self) -> List[int]:
        """The NUMA nodes to which the kernel has bound this process's new pages, whoever asked for it; empty if the
        memory is not bound."""
        number = _GET_MEMPOLICY.get(self.architecture())
        if number is None:
            return []
        policy, mask = ctypes.c_int(), (ctypes.c_ulong * (_MASK_BITS // 64))()
        libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(_MASK_BITS)
        failed = libc.syscall(ctypes.c_long(number), ctypes.byref(policy), mask, size, None, ctypes.c_ulong(0))
        if failed or policy.value & ~_POLICY_FLAGS != _MPOL_BIND:
            return []
        return [node for node in range(_MASK_BITS) if mask[node // 64] >> (node % 64) & 1]


def _numbers(text: str) -> List[int]:
    numbers: List[int] = []
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


_system = System()


def this_system() -> System:
    """The system that this process runs on, or the one in its place."""
    return _system


@contextlib.contextmanager
def use_system(system: System) -> Iterator[System]:
    """Have all code of this process see another system while the context is open."""
    global _system
    former, _system = _system, system
    try:
        yield system
    finally:
        _system = former
