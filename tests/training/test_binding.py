"""Tests of which cores a rank gets, and that it is really bound to them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.machine.local import numa_nodes_of
from fugaku_gpt.machine.system import use_system
from fugaku_gpt.training.binding import bind, cores_for_rank
from tests.support.recorded import a64fx_node

A64FX = [list(range(12 + 12 * group, 24 + 12 * group)) for group in range(4)]


def test_four_ranks_of_twelve_threads_get_a_core_memory_group_each() -> None:
    assert [cores_for_rank(rank, 4, 12, A64FX) for rank in range(4)] == A64FX


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 6, 7, 12, 16, 24, 48])
def test_no_core_is_given_twice_and_small_ranks_stay_within_a_group(threads: int) -> None:
    ranks = 48 // threads
    given = [cores_for_rank(rank, ranks, threads, A64FX) for rank in range(ranks)]
    assert all(len(cores) == threads for cores in given)
    assert len({core for cores in given for core in cores}) == ranks * threads
    if 12 % threads == 0:
        assert all(any(set(cores) <= set(group) for group in A64FX) for cores in given)


def test_a_bound_process_reports_the_binding() -> None:
    program = (
        "import os\nfrom fugaku_gpt.comm import Communicator\nfrom fugaku_gpt.training.binding import bind\n"
        "print(bind(Communicator.alone(), 'memory', 1)['bound'], sorted(os.sched_getaffinity(0)))"
    )
    output = run(program)
    assert output[0] in ("cores and memory", "cores") and output[1] == str([min(os.sched_getaffinity(0))])


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_is_reported_as_bound_if_the_kernel_confirms_it(refuses: bool) -> None:
    nodes = numa_nodes_of([min(os.sched_getaffinity(0))])
    if not refuses and not lets_bind_memory(nodes):
        pytest.skip("this kernel does not let a process bind its memory")
    program = (
        "from fugaku_gpt.comm import Communicator, ProcessGrid\nfrom fugaku_gpt.config import load_run_config\n"
        "from fugaku_gpt.machine import system\nfrom fugaku_gpt.training import binding\n"
        "from fugaku_gpt.training.startup import collect_environment\n"
        f"system._SET_MEMPOLICY = {{}} if {refuses} else system._SET_MEMPOLICY\n"
        "process = binding.bind(Communicator.alone(), 'memory', 1)\n"
        "rank = collect_environment(load_run_config(), ProcessGrid.alone(), process)['ranks'][0]\n"
        "print(rank['bound'], rank['memory_nodes'])"
    )
    assert run(program) == (["cores", "[]"] if refuses else ["cores and memory", str(nodes)])


def lets_bind_memory(nodes: List[int]) -> bool:
    """Whether ``set_mempolicy(MPOL_BIND)`` of these nodes succeeds, asked without the code under test."""
    number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    if not nodes or number is None:
        return False
    program = (
        "import ctypes, sys\nmask = (ctypes.c_ulong * 16)()\n"
        f"for node in {nodes}: mask[node // 64] |= 1 << node % 64\n"
        f"sys.exit(ctypes.CDLL(None).syscall(ctypes.c_long({number}), 2, mask, ctypes.c_ulong(1024)) != 0)"
    )
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def run(program: str) -> List[str]:
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    bound, _, cores = done.stdout.strip().partition(" [")
    return [bound, "[" + cores]


def test_more_threads_than_cores_are_not_bound() -> None:
    program = (
        "from fugaku_gpt.comm import Communicator\nfrom fugaku_gpt.training.binding import bind\n"
        "print(bind(Communicator.alone(), 'cores', 100000)['bound'], [])"
    )
    assert run(program)[0].startswith("no: 1 ranks * 100000 threads are more than")


@pytest.mark.parametrize(
    ("policy", "threads", "cores", "nodes", "bound"),
    [
        ("memory", 48, list(range(12, 60)), [4, 5, 6, 7], "cores and memory"),
        ("memory", 12, list(range(12, 24)), [4], "cores and memory"),
        ("memory", 24, list(range(12, 36)), [4, 5], "cores and memory"),
        ("cores", 12, list(range(12, 24)), [], "cores"),
        ("none", 12, list(range(12, 60)), [], None),
        ("cores", 49, list(range(12, 60)), [], "no: 1 ranks * 49 threads are more than 48 cores"),
    ],
)
def test_a_rank_on_an_a64fx_node_is_bound_to_core_memory_groups(
    tmp_path: Path, policy: str, threads: int, cores: List[int], nodes: List[int], bound: Optional[str]
) -> None:
    system = a64fx_node(tmp_path)
    with use_system(system):
        assert bind(Communicator.alone(), policy, threads).get("bound") == bound
    assert (system.affinity(), system.memory_nodes()) == (cores, nodes)
