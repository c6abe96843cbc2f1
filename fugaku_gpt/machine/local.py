"""Reads the hardware of this machine and the actual settings of this process, and sets nothing."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

from fugaku_gpt.config.knobs import is_requested
from fugaku_gpt.config.schema import NODE_KNOBS, NodeConfig
from fugaku_gpt.machine.memory import control_groups, machine_memory, private_and_shared_bytes
from fugaku_gpt.machine.system import this_system

SIMULATED = "FUGAKU_GPT_SIMULATOR"  # set in jobs of `fugaku-gpt sim`
A64FX = "Fujitsu A64FX"  # as processor_name() calls it
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc", "libmpg")  # libmpg: large pages of A64FX
_LIBRARY_DIRS = ("usr/lib", "usr/lib64", "lib64", "usr/local/lib", "usr/local/lib64")
_VECTOR_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16", "avx2", "fma", "sve2", "sve", "asimd")


def usable_cores() -> List[int]:
    """Numbers of the cores that this process may run on."""
    return this_system().affinity()


def threads_of_rank(ranks_per_node: int) -> int:
    """Threads of a rank for which no number is set: an equal share of the cores of this node's ranks, at least 1.

    A launcher may have bound this rank to fewer cores, which then are its own: on Fugaku each of four ranks has the 12
    of a core-memory group.
    """
    own, launcher = set(usable_cores()), set(this_system().launcher_affinity())
    cores = own
    if launcher > own:
        cores = launcher
    elif launcher and launcher != own:  # a daemon with cores of its own, such as A64FX's assistant cores
        cores = set(online_cores())
    allowed = _cores_of_control_group()  # a launcher may run outside of the group that limits the ranks
    cores = (cores & allowed or cores) if allowed else cores
    return max(1, min(len(own), len(cores) // ranks_per_node))


def _cores_of_control_group() -> Set[int]:
    """The cores that the control group of this process may use; empty where it does not say."""
    for version, folders in this_system().control_groups("cpuset"):
        name = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
        for folder in reversed(folders):  # where a group leaves it to the group around it, it has no such file
            cores = this_system().read_numbers(f"{folder}/{name}")
            if cores:
                return set(cores)
    return set()


def online_cores() -> List[int]:
    """Numbers of the cores of this machine that are switched on, whoever may use them."""
    return this_system().read_numbers("sys/devices/system/cpu/online") or list(range(os.cpu_count() or 1))


def group_by_numa_node(cores: Sequence[int]) -> List[List[int]]:
    """Group cores by their NUMA node; one group if the system does not report nodes."""
    groups: Dict[int, List[int]] = {}
    for core in cores:
        node = _numa_node_of(core)
        groups.setdefault(-1 if node is None else node, []).append(core)
    return [groups[node] for node in sorted(groups)]


def numa_nodes_of(cores: Sequence[int]) -> List[int]:
    """Return the NUMA nodes of some cores; empty if the system does not report nodes."""
    return sorted({node for node in map(_numa_node_of, cores) if node is not None})


def _numa_node_of(core: int) -> Optional[int]:
    for path in this_system().path(f"sys/devices/system/cpu/cpu{core}").glob("node[0-9]*"):
        return int(path.name[4:])
    return None


def memory_limit() -> int:
    """Bytes of memory that the processes of this node may use: the machine's, or the control group's if that is
    less."""
    return min([machine_memory()[0], *(group.limit for group in control_groups())])


def node_used_bytes() -> int:
    """Memory in use on this node: all processes and the system, without caches. The tables' Mem column."""
    total, available = machine_memory()
    return total - available


def seconds_without_core() -> Optional[float]:
    """Seconds that the threads of this process have waited for a core in all, while other work had it; None where the
    kernel does not count them."""
    system = this_system()
    # Linux, Documentation/scheduler/sched-stats.rst: nanoseconds on a core, nanoseconds in its queue, number of turns
    threads = [task.name for task in system.path("proc/self/task").glob("[0-9]*")]
    counts = [(system.read(f"proc/self/task/{thread}/schedstat") or "").split() for thread in threads]
    waits = [int(numbers[1]) for numbers in counts if len(numbers) == 3]  # a thread may have ended since it was listed
    return sum(waits) / 1e9 if waits else None


def resident_bytes() -> int:
    """Resident memory of this process, with that in large pages."""
    return sum(private_and_shared_bytes(os.getpid()))


def out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed for memory on this machine, or in this control group if it counts
    them."""
    groups = this_system().read("sys/fs/cgroup/memory.events") or ""
    counted = re.search(r"^oom_kill (\d+)$", groups, re.MULTILINE)
    machine = re.search(r"^oom_kill (\d+)$", this_system().read("proc/vmstat") or "", re.MULTILINE)
    return max(int(match[1]) if match else 0 for match in (counted, machine))


def processor_name() -> str:
    """The processor's model name, or its architecture if the system has no name."""
    text = this_system().read("proc/cpuinfo") or ""
    # Arm's number of Fujitsu, and Fujitsu's of A64FX. They go first: some systems call every Arm processor alike.
    is_fujitsu = re.search(r"^CPU implementer\s*:\s*0x46$", text, re.MULTILINE)
    if is_fujitsu and re.search(r"^CPU part\s*:\s*0x001$", text, re.MULTILINE):
        return A64FX
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else this_system().architecture()


def vector_flags() -> List[str]:
    """The relevant vector extensions that the processor reports."""
    text = this_system().read("proc/cpuinfo") or ""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    reported = set(match[1].split()) if match else set()
    return [flag for flag in _VECTOR_FLAGS if flag in reported]


def find_tcmalloc() -> Optional[Path]:
    """The tcmalloc library to preload, or None if none is installed; the minimal one (no profiler) is preferred."""
    roots = [this_system().path(directory) for directory in _LIBRARY_DIRS]
    roots += [child for root in roots for child in root.glob(f"{this_system().architecture()}-linux-gnu*")]
    for pattern in ("libtcmalloc_minimal.so*", "libtcmalloc.so*"):
        for root in roots:
            libraries = sorted(root.glob(pattern))
            if libraries:
                return libraries[-1]
    return None


def allocator_in_use() -> str:
    """Name of the file of the allocator mapped into this process, or ``libc``."""
    for line in (this_system().read("proc/self/maps") or "").splitlines():
        name = line.rpartition("/")[2]
        if any(allocator in name for allocator in _ALLOCATORS):
            return name
    return "libc"


def job_resources() -> Dict[str, str]:
    """The custom resources that PJM granted to this job (power knobs among them); empty outside PJM.

    PJM puts them into the job's environment as a comma-separated list of key=value, from which they are read back. The
    simulated PJM grants resources that it does not have, so under it none are returned.
    """
    listed = "" if os.environ.get(SIMULATED) else os.environ.get("PJM_CUSTOM_RESOURCES", "")
    return dict(pair.split("=", 1) for pair in listed.split(",") if "=" in pair)


def clock_mhz() -> Optional[int]:
    """The clock that this process's cores are fixed to, in MHz: PJM's grant, or equal lowest and highest cpufreq
    limits."""
    granted = job_resources().get("freq")
    if granted is not None and granted.isdecimal():
        return int(granted)
    limits = set()
    for core in usable_cores():
        for bound in ("scaling_min_freq", "scaling_max_freq"):
            limits.add(this_system().read(f"sys/devices/system/cpu/cpu{core}/cpufreq/{bound}"))
    text = limits.pop() if len(limits) == 1 else None
    return int(text) // 1000 if text and text.isdecimal() else None


@dataclass(frozen=True)
class Toggle:
    """One toggle of a node: the requested value, whether this machine applies it, and the observed value."""

    name: str
    requested: object
    applied: bool
    seen: str


def read_back_toggles(node: NodeConfig) -> List[Toggle]:
    """Checks each requested toggle against the state of this process; to be called inside a rank."""
    toggles: List[Toggle] = []
    for knob in NODE_KNOBS:
        requested = getattr(node, knob.name)
        if not is_requested(requested):
            continue
        if knob.name in _READ_BACK:
            toggles += _READ_BACK[knob.name](requested)
        elif knob.is_power_knob:
            state = job_resources().get(knob.resource)
            toggles.append(Toggle(knob.name, requested, state == str(requested), state or "no such control here"))
    return toggles


def _read_back_tcmalloc(requested: bool) -> List[Toggle]:
    allocator = allocator_in_use()
    return [Toggle("tcmalloc", requested, "tcmalloc" in allocator, allocator)]


def _read_back_preload(libraries: Sequence[str]) -> List[Toggle]:
    mapped = _mapped_files()
    loaded = [(library, Path(library).name in mapped) for library in libraries]
    return [
        Toggle("preload", library, is_there, "loaded" if is_there else "not loaded") for library, is_there in loaded
    ]


def _read_back_clock(megahertz: int) -> List[Toggle]:
    clock = clock_mhz()
    return [Toggle("freq_mhz", megahertz, clock == megahertz, f"{clock} MHz" if clock else "clock not fixed")]


def _read_back_large_pages(kind: str) -> List[Toggle]:
    if kind != "hugetlbfs":
        return []
    # Fujitsu's library hooks malloc; without it the variables mean nothing
    is_there = any(name.startswith("libmpg.so") for name in _mapped_files())
    seen = "libmpg.so loaded" if is_there else "no large-page library loaded"
    return [Toggle("large_pages", kind, is_there, seen)]


def _read_back_open_files(files: int) -> List[Toggle]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [Toggle("open_files", files, limit >= files, str(limit))]


# knobs that are not read from the resources that PJM granted; power knobs are, and all others are not read back
_READ_BACK: Dict[str, Callable[[Any], List[Toggle]]] = {
    "tcmalloc": _read_back_tcmalloc,
    "preload": _read_back_preload,
    "freq_mhz": _read_back_clock,
    "large_pages": _read_back_large_pages,
    "open_files": _read_back_open_files,
}


def _mapped_files() -> Set[str]:
    """Names of the files that are mapped into this process."""
    return {line.rpartition("/")[2] for line in (this_system().read("proc/self/maps") or "").splitlines()}
