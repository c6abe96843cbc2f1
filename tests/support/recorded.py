"""Nodes of other machines: folders with the kernel's files, and a system that answers from them.

The A64FX node is written by hand from public facts: the user guide of Fugaku (cores 12 to 59 in four core-memory
groups, which are NUMA nodes 4 to 7; two or four assistant cores from 0 on; 28.6 GiB for a job; pages of 2 MiB by
hugetlbfs) and Linux on that processor (implementer 0x46, part 0x001; pages of 64 KiB). Not from there, and made up: the
names of control groups, that assistant cores are NUMA node 0, and sizes in use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence

from fugaku_gpt.machine.system import System

CORE_MEMORY_GROUPS = {4: range(12, 24), 5: range(24, 36), 6: range(36, 48), 7: range(48, 60)}
JOB_BYTES = 30_739_333_120
_FEATURES = "fp asimd evtstrm sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm fcma dcpop sve"
_GROUP = "job_7"


class RecordedSystem(System):
    """A system whose files are in a folder, and whose answers to calls are those of a process on that node."""

    def __init__(
        self, root: Path, cores: Sequence[int], architecture: str = "aarch64", page_bytes: int = 65536
    ) -> None:
        super().__init__(root)
        self._cores, self._architecture, self._page_bytes = sorted(cores), architecture, page_bytes
        self._memory_nodes: List[int] = []
        self.launcher_cores = list(range(12, 60))  # of the process that started this one

    def architecture(self) -> str:
        return "aarch64"

    def page_bytes(self) -> int:
        return 65536

    def affinity(self) -> List[int]:
        return list(self._cores)

    def launcher_affinity(self) -> List[int]:
        return self.launcher_cores

    def set_affinity(self, cores: Iterable[int]) -> None:
        self._cores = sorted(cores)

    def set_memory_nodes(self, nodes: Sequence[int]) -> bool:
        self._memory_nodes = sorted(nodes)
        return True

    def memory_nodes(self) -> List[int]:
        return self._memory_nodes


def a64fx_node(
    root: Path,
    cores: Optional[Sequence[int]] = None,
    assistants: int = 2,
    control_groups: str = "version 1",
    hugetlb_kib: int = 0,
) -> RecordedSystem:
    """Write the files of an A64FX node in a job, and return the system of a process there.

    Args:
        cores: the cores that the process may use; default: all compute cores.
        assistants: number of assistant cores.
        control_groups: ``version 1`` or ``version 2`` of those that limit the job's memory and cores, or ``none``.
        hugetlb_kib: KiB of the process in large pages, which its resident size leaves out.
    """
    own_cores = list(cores) if cores is not None else list(range(12, 60))
    online = [*range(assistants), *range(12, 60)]
    processor = f"BogoMIPS\t: 200.00\nFeatures\t: {_FEATURES}\nCPU implementer\t: 0x46\nCPU architecture: 8\n"
    processor += "CPU variant\t: 0x1\nCPU part\t: 0x001\nCPU revision\t: 0\n"
    own = f"{own_cores[0]}-{own_cores[-1]}"
    files: Dict[str, str] = {
        "proc/cpuinfo": "\n".join(f"processor\t: {core}\n{processor}" for core in online),
        "proc/meminfo": _meminfo(33_230_848, 30_100_000),
        "proc/vmstat": "pgfault 9\npswpin 0\noom_kill 0",
        # 20480 pages of 64 KiB, 5120 of which may be shared
        f"proc/{os.getpid()}/statm": "40960 20480 5120 64 0 30000 0",
        f"proc/{os.getpid()}/status": f"VmHWM:\t 1572864 kB\nVmRSS:\t 1310720 kB\nHugetlbPages:\t {hugetlb_kib} kB\n"
        f"Cpus_allowed_list:\t{own}\nMems_allowed_list:\t4-7",
        "proc/self/maps": "400000-410000 r-xp 00000000 00:13 1 /usr/bin/python3\n"
        + ("410000-420000 r-xp 00000000 00:13 2 /opt/FJSVxos/lib64/libmpg.so.1\n" if hugetlb_kib else ""),
        "sys/devices/system/cpu/online": f"0-{assistants - 1},12-59" if assistants else "12-59",
        "sys/devices/system/node/online": "0,4-7" if assistants else "4-7",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0",
    }
    if assistants:
        files["sys/devices/system/node/node0/cpulist"] = f"0-{assistants - 1}"
        files["sys/devices/system/node/node0/meminfo"] = "Node 0 MemTotal: 524288 kB\nNode 0 MemFree: 131072 kB"
    for node, group in CORE_MEMORY_GROUPS.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{group[0]}-{group[-1]}"
        files[f"sys/devices/system/node/node{node}/meminfo"] = (
            f"Node {node} MemTotal: 8176640 kB\nNode {node} MemFree: 7000000 kB\nNode {node} MemUsed: 1176640 kB\n"
            f"Node {node} Inactive(file): 100000 kB"
        )
        for core in group:
            (root / f"sys/devices/system/cpu/cpu{core}/node{node}").mkdir(parents=True)
    files.update(_control_groups(control_groups))
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    (root / "dev/shm").mkdir(parents=True)
    (root / "proc/self").joinpath("status").symlink_to(root / f"proc/{os.getpid()}/status")
    return RecordedSystem(root, own_cores)


def _meminfo(total: int, available: int) -> str:
    return (
        f"MemTotal: {total} kB\nMemFree: {available} kB\nMemAvailable: {available} kB\nSwapTotal: 0 kB\n"
        "SwapFree: 0 kB\nHugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB"
    )


def _control_groups(version: str) -> Dict[str, str]:
    """The files of the control groups that limit a job's memory and cores."""
    if version == "version 1":
        memory = f"sys/fs/cgroup/memory/{_GROUP}"
        return {
            "proc/self/cgroup": f"9:memory:/{_GROUP}\n4:cpuset:/{_GROUP}/rank\n1:name=systemd:/",
            f"{memory}/memory.limit_in_bytes": str(JOB_BYTES),
            f"{memory}/memory.usage_in_bytes": str(2**30),
            f"{memory}/memory.stat": "total_inactive_file 0",
            f"sys/fs/cgroup/cpuset/{_GROUP}/cpuset.effective_cpus": "12-59",
        }
    if version == "version 2":
        return {
            "proc/self/cgroup": f"0::/{_GROUP}",
            f"sys/fs/cgroup/{_GROUP}/memory.max": str(JOB_BYTES),
            f"sys/fs/cgroup/{_GROUP}/memory.current": str(2**30),
            f"sys/fs/cgroup/{_GROUP}/memory.stat": "inactive_file 0",
            f"sys/fs/cgroup/{_GROUP}/cpuset.cpus.effective": "12-59",
        }
    return {}
