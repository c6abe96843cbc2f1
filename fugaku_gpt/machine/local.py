"""What this machine has and what the present process is really running on; read, never set."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import psutil

from fugaku_gpt.config.schema import NodeConfig
from fugaku_gpt.machine.memory import control_groups

SIMULATED = "FUGAKU_GPT_SIMULATOR"  # set in jobs of `fugaku-gpt sim`
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc", "libmpg")  # the last one: large pages of A64FX
_LIBRARY_DIRS = ("/usr/lib", "/usr/lib64", "/lib64", "/usr/local/lib", "/usr/local/lib64")
_VECTOR_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16", "avx2", "fma", "sve2", "sve", "asimd")


def usable_cores() -> List[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def memory_limit() -> int:
    """Bytes of memory that the processes of this node may use: the machine's, or the control group's if that is
    less."""
    return min([int(psutil.virtual_memory().total), *(group.limit for group in control_groups())])


def node_used_bytes() -> int:
    """Memory in use on this node: all processes and the system, without caches. The tables' Mem column."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory: on this machine, or in this control group where it counts
    them."""
    groups = _read("/sys/fs/cgroup/memory.events") or ""
    counted = re.search(r"^oom_kill (\d+)$", groups, re.MULTILINE)
    machine = re.search(r"^oom_kill (\d+)$", _read("/proc/vmstat") or "", re.MULTILINE)
    return max(int(found[1]) if found else 0 for found in (counted, machine))


def processor_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    text = _read("/proc/cpuinfo") or ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if named:
        return named[1].strip()
    if re.search(r"^CPU implementer\s*:\s*0x46$", text, re.MULTILINE):  # Fujitsu's number in Arm's list of implementers
        return "Fujitsu A64FX"
    return platform.machine()


def vector_flags() -> List[str]:
    """The vector extensions that the processor reports, of those that matter here."""
    text = _read("/proc/cpuinfo") or ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words = set(found[1].split()) if found else set()
    return [flag for flag in _VECTOR_FLAGS if flag in words]


def find_tcmalloc() -> Optional[Path]:
    """The tcmalloc library to preload, or None where none is installed; the minimal one (no profiler) is preferred."""
    roots = [Path(directory) for directory in _LIBRARY_DIRS]
    roots += [child for root in roots for child in root.glob(f"{platform.machine()}-linux-gnu*")]
    for pattern in ("libtcmalloc_minimal.so*", "libtcmalloc.so*"):
        for root in roots:
            found = sorted(root.glob(pattern))
            if found:
                return found[-1]
    return None


def allocator_in_use() -> str:
    """Name of the file of the allocator mapped into this process, or ``libc``."""
    for line in (_read("/proc/self/maps") or "").splitlines():
        name = line.rpartition("/")[2]
        if any(allocator in name for allocator in _ALLOCATORS):
            return name
    return "libc"


def job_resources() -> Dict[str, str]:
    """The custom resources that PJM granted to this job (power knobs among them); empty outside PJM.

    PJM puts them into the job's environment as a comma list of key=value: they are read back as facts. The simulated
    PJM grants what it cannot give: there they are not.
    """
    listed = "" if os.environ.get(SIMULATED) else os.environ.get("PJM_CUSTOM_RESOURCES", "")
    return dict(pair.split("=", 1) for pair in listed.split(",") if "=" in pair)


def clock_mhz() -> Optional[int]:
    """The clock that this process's cores are fixed to, in MHz: PJM's grant, or equal lowest and highest cpufreq
    limits."""
    granted = job_resources().get("freq")
    if granted is not None and granted.isdigit():
        return int(granted)
    limits = set()
    for core in usable_cores():
        for bound in ("scaling_min_freq", "scaling_max_freq"):
            limits.add(_read(f"/sys/devices/system/cpu/cpu{core}/cpufreq/{bound}"))
    text = limits.pop() if len(limits) == 1 else None
    return int(text) // 1000 if text and text.isdigit() else None


@dataclass(frozen=True)
class Toggle:
    """One toggle of a node: what was asked for, whether this machine really runs so, and what was seen instead."""

    name: str
    requested: object
    applied: bool
    seen: str


def read_back_toggles(node: NodeConfig) -> List[Toggle]:
    """The toggles that were asked for, each checked against what this process sees. Call it inside a rank."""
    toggles = []
    if node.tcmalloc:
        allocator = allocator_in_use()
        toggles.append(Toggle("tcmalloc", True, "tcmalloc" in allocator, allocator))
    if node.freq_mhz is not None:
        clock = clock_mhz()
        seen = f"{clock} MHz" if clock else "clock not fixed"
        toggles.append(Toggle("freq_mhz", node.freq_mhz, clock == node.freq_mhz, seen))
    for knob in ("eco_state", "retention_state", "throttling_state", "issue_state", "ex_pipe_state"):
        wanted = getattr(node, knob)
        if wanted is not None:
            state = job_resources().get(knob)
            toggles.append(Toggle(knob, wanted, state == str(wanted), state or "no such control here"))
    mapped = {line.rpartition("/")[2] for line in (_read("/proc/self/maps") or "").splitlines()}
    for library in node.preload:
        there = Path(library).name in mapped
        toggles.append(Toggle("preload", library, there, "loaded" if there else "not loaded"))
    if node.large_pages == "hugetlbfs":  # Fujitsu's library hooks malloc; without it the variables mean nothing
        there = any(name.startswith("libmpg.so") for name in mapped)
        seen = "libmpg.so loaded" if there else "no large-page library loaded"
        toggles.append(Toggle("large_pages", node.large_pages, there, seen))
    if node.open_files is not None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        toggles.append(Toggle("open_files", node.open_files, limit >= node.open_files, str(limit)))
    return toggles


def _read(path: str) -> Optional[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # absent on this kernel, or not ours to read: the fact is unknown
        return None
