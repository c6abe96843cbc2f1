"""Tests of what is decided from the files of an A64FX node in a job: cores, NUMA nodes, threads, limits of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_gpt.config import NodeConfig
from fugaku_gpt.kernels import build
from fugaku_gpt.machine import local
from fugaku_gpt.machine.fugaku import CORES
from fugaku_gpt.machine.memory import NodeMemory, control_groups, machine_use, private_and_shared_bytes
from fugaku_gpt.machine.system import System, use_system
from fugaku_gpt.planner.trainer.memory_check import local_node_limits
from fugaku_gpt.training.memory_guard import peak_resident_bytes
from tests.support.recorded import CORE_MEMORY_GROUPS, JOB_BYTES, a64fx_node

MIB = 2**20


def test_the_processor_and_its_cores_are_recognised(tmp_path: Path) -> None:
    with use_system(a64fx_node(tmp_path)):
        assert local.processor_name() == local.A64FX and local.vector_flags() == ["sve", "asimd"]
        assert local.usable_cores() == list(range(12, 60)) and len(local.usable_cores()) == CORES
        assert local.online_cores() == [0, 1, *range(12, 60)]
        assert local.group_by_numa_node(local.usable_cores()) == [list(cores) for cores in CORE_MEMORY_GROUPS.values()]
        assert local.numa_nodes_of(range(30, 40)) == [5, 6]
        assert build.library_file().name.startswith("kernels-")


@pytest.mark.parametrize("control_groups_of_job", ["version 1", "version 2"])
def test_the_job_has_less_memory_than_the_machine(tmp_path: Path, control_groups_of_job: str) -> None:
    with use_system(a64fx_node(tmp_path, control_groups=control_groups_of_job)):
        assert local.memory_limit() == JOB_BYTES
        assert [(group.limit, group.used()) for group in control_groups()] == [(JOB_BYTES, 2**30)]
        assert local_node_limits("2.0").limits[0][0] == JOB_BYTES
        assert local.node_used_bytes() == (33_230_848 - 30_100_000) * 1024
        assert local.out_of_memory_kills() == 0


def test_without_control_groups_the_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    with use_system(a64fx_node(tmp_path, control_groups="none")):
        assert local.memory_limit() == machine_use().limit == 33_230_848 * 1024


@pytest.mark.parametrize(
    ("cores", "launcher", "ranks_per_node", "threads"),
    [
        (range(12, 60), range(12, 60), 1, 48),
        (range(12, 60), range(12, 60), 4, 12),  # not bound: each takes its share
        (range(24, 36), range(12, 60), 4, 12),  # bound to a core-memory group, which it has for itself
        (range(24, 36), range(2), 4, 12),  # started by a daemon on the assistant cores
        (range(12, 60), range(2), 1, 48),
        (range(24, 36), range(12, 60), 8, 6),  # bound to a core-memory group that two ranks share
        (range(12, 13), range(12, 60), 48, 1),
        (range(12, 14), range(12, 14), 4, 1),  # more ranks than cores
    ],
)
def test_a_rank_has_as_many_threads_as_cores_of_its_own(
    tmp_path: Path, cores: range, launcher: range, ranks_per_node: int, threads: int
) -> None:
    system = a64fx_node(tmp_path, cores)
    system.launcher_cores = list(launcher)
    with use_system(system):
        assert local.threads_of_rank(ranks_per_node) == threads


@pytest.mark.parametrize(
    ("version", "file"),
    [
        ("version 1", "sys/fs/cgroup/cpuset/job_7/cpuset.effective_cpus"),
        ("version 2", "sys/fs/cgroup/job_7/cpuset.cpus.effective"),
    ],
)
def test_ranks_share_the_cores_of_their_control_group_although_their_launcher_has_more(
    tmp_path: Path, version: str, file: str
) -> None:
    """A scheduler that gives a job some cores of a node may start ranks from outside of the job's group."""
    system = a64fx_node(tmp_path, range(12, 24), control_groups=version)
    (tmp_path / file).write_text("12-23\n")
    with use_system(system):
        assert local.threads_of_rank(4) == 3


def test_the_cores_of_the_process_that_started_this_one_are_read() -> None:
    """Pytest, or its worker, was started by something that may run somewhere."""
    assert set(System().launcher_affinity()) == os.sched_getaffinity(os.getppid())


class BoundSystem(System):
    """A system whose process may use the cores of one core-memory group."""

    def affinity(self) -> "list[int]":
        return list(range(24, 36))


@pytest.mark.parametrize(
    ("wrapper_variables", "cores"),
    [
        ("PMIX_RANK=1\0PLE_RANK_ON_NODE=1\0", range(12, 60)),
        ("PMI_RANK=1\0PMI_SIZE=4\0", range(12, 60)),
        ("HOME=/root\0", range(24, 36)),  # a shell that the user gave these cores, whose ranks share them
    ],
)
def test_a_script_around_a_rank_is_no_launcher(tmp_path: Path, wrapper_variables: str, cores: range) -> None:
    for process, parent, spans in ((os.getppid(), 71, "24-35"), (71, 70, "24-35"), (70, 1, "12-59")):
        folder = tmp_path / f"proc/{process}"
        folder.mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tsh\nPPid:\t{parent}\nCpus_allowed_list:\t{spans}\n")
        (folder / "environ").write_text(wrapper_variables)
    with use_system(BoundSystem(tmp_path)) as system:
        assert system.launcher_affinity() == list(cores)
        assert local.threads_of_rank(4) == len(cores) // 4


def test_a_real_script_around_a_bound_rank_is_no_launcher() -> None:
    own = sorted(os.sched_getaffinity(0))
    if len(own) == 1:
        pytest.skip("needs two cores")
    program = "from fugaku_gpt.machine.system import System; print(System().launcher_affinity())"
    output = subprocess.run(
        ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program],
        env={**os.environ, "PMI_RANK": "0", "PMI_SIZE": str(len(own))},
        preexec_fn=lambda: os.sched_setaffinity(0, own[:1]),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    assert output.decode().strip() == str(own)


def test_resident_memory_counts_pages_of_64_kib_and_large_pages(tmp_path: Path) -> None:
    """The heap of programs with Fujitsu's library lies in large pages, which the kernel reports apart."""
    with use_system(a64fx_node(tmp_path, hugetlb_kib=4 * 2**20)):
        assert private_and_shared_bytes(os.getpid()) == (960 * MIB + 2**32, 320 * MIB)
        assert local.resident_bytes() == 1280 * MIB + 2**32
        assert peak_resident_bytes() == 1536 * MIB + 2**32
        (toggle,) = local.read_back_toggles(NodeConfig(large_pages="hugetlbfs"))
        assert toggle.applied and toggle.seen == "libmpg.so loaded"


def test_a_process_bound_to_a_core_memory_group_has_the_memory_of_that_group(tmp_path: Path) -> None:
    """When its 8 GiB are used up, the kernel ends the process, whatever is free in other groups."""
    system = a64fx_node(tmp_path)
    with use_system(system):
        assert NodeMemory([os.getpid()]).uses()[0].source == "its control group"
        system.set_memory_nodes([5])
        use = NodeMemory([os.getpid()]).uses()[0]
        assert use.source == "NUMA node 5, to which memory is bound"
        assert (use.limit, use.used) == (8_176_640 * 1024, (8_176_640 - 7_000_000 - 100_000) * 1024)
        system.set_memory_nodes([4, 5, 6, 7])
        (use,) = (use for use in NodeMemory([os.getpid()]).uses() if "NUMA" in use.source)
        assert use.source == "NUMA nodes 4, 5, 6, 7, to which memory is bound" and use.limit == 4 * 8_176_640 * 1024
