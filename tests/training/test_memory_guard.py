"""Tests that the memory guard ends a process that really allocates, before the kernel does."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Iterator, List, Mapping

import pytest

from fugaku_gpt.config.schema import NodeConfig
from fugaku_gpt.errors import EXIT_RUN_FAILED
from fugaku_gpt.machine.memory import MemoryUse
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.memory_guard import MemoryGuard

MIB = 2**20
ROOT = Path("/sys/fs/cgroup")

# allocates and touches about 50 MiB a second for ever, in the control group whose file of processes is given
GREEDY = """
import os, sys, time
from pathlib import Path
if sys.argv[3]:
    Path(sys.argv[3]).write_text(str(os.getpid()))
import numpy as np
from fugaku_gpt.config.schema import NodeConfig
from fugaku_gpt.machine.local import resident_bytes
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.memory_guard import MemoryGuard
limit = f"{resident_bytes() // 2**20 + 200}Mi" if sys.argv[2] else ""
with MemoryGuard(RunDirectory(Path(sys.argv[1])), 1, [os.getpid()], NodeConfig(memory_limit=limit)) as guard:
    weights = np.ones(64 * 2**20, dtype=np.uint8)
    guard.set_memory_by_category(lambda: {"weights": weights.nbytes, "gradients": 0})
    allocated = []
    while True:
        allocated.append(np.ones(2**20, dtype=np.uint8))
        time.sleep(0.02)
"""


def greedy(directory: Path, limited: bool, group: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", GREEDY, str(directory), "limited" if limited else "", group]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_rank_that_allocates_without_end_is_ended_and_the_memory_use_is_reported(tmp_path: Path) -> None:
    done = greedy(tmp_path, limited=True)
    result = RunDirectory(tmp_path).result()
    assert done.returncode == 1 and result is not None and result.status == "oom", done
    assert (result.rank, result.node, result.exception) == (1, os.uname().nodename, "memory guard")
    assert "(limit: node.memory_limit)" in result.reason and result.reason in done.stderr
    memory_use = result.reason.rpartition("at most: ")[2]
    mib_by_category = {name.rpartition(" ")[0]: int(name.rpartition(" ")[2]) for name in memory_use.split(", ")}
    assert (
        mib_by_category["weights"] == 64
        and mib_by_category["before the model was there"] > 20
        and "gradients" not in mib_by_category
    )
    assert 30 < mib_by_category["activations and the rest"] < 140  # 200 MiB more than before, less weights and margin


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 400 MiB."""
    version_1 = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if version_1 else ROOT) / f"fugaku-gpt-{uuid.uuid4().hex[:8]}"
    if version_1:  # below the group that this process is in
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), "/")
        folder = ROOT / "memory" / own.lstrip("/") / folder.name
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(400 * MIB))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield folder
    folder.rmdir()


def test_a_rank_is_ended_before_it_reaches_the_limit_of_a_real_control_group(tmp_path: Path, group: Path) -> None:
    done = greedy(tmp_path, limited=False, group=str(group / "cgroup.procs"))
    result = RunDirectory(tmp_path).result()
    assert done.returncode == 1 and result is not None and result.status == "oom", done  # not -9 by the kernel
    assert "of 400 MiB" in result.reason and "(limit: its control group)" in result.reason


def test_a_run_with_enough_memory_is_left_alone(tmp_path: Path) -> None:
    ended = []
    with MemoryGuard(RunDirectory(tmp_path), 0, [os.getpid()], NodeConfig(), exit_process=ended.append):
        allocated = bytearray(32 * MIB)
    assert not ended and allocated and RunDirectory(tmp_path).result() is None


def test_the_process_is_ended_even_if_the_report_of_memory_use_fails(tmp_path: Path) -> None:
    codes: List[int] = []
    guard = MemoryGuard(RunDirectory(tmp_path), 0, [os.getpid()], NodeConfig(memory_limit="1Mi"), codes.append)

    def memory_by_category() -> Mapping[str, int]:
        raise RuntimeError("changed during iteration")

    guard.set_memory_by_category(memory_by_category)
    with pytest.raises(RuntimeError):
        guard._end_run(MemoryUse(1, 1, "node.memory_limit"))
    assert codes == [EXIT_RUN_FAILED]


@pytest.mark.parametrize(("is_node_wide", "waits"), [(False, False), (True, True)])
def test_a_rank_waits_for_a_larger_one_only_if_both_are_under_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_node_wide: bool, waits: bool
) -> None:
    """The group of cores that a larger rank is bound to may have memory left."""
    polls: List[int] = []
    guard = MemoryGuard(RunDirectory(tmp_path), 0, [os.getpid()], NodeConfig(), lambda code: None)

    def uses() -> List[MemoryUse]:
        polls.append(len(polls))
        return [MemoryUse(8 * MIB, 8 * MIB, "a limit", is_node_wide)]

    monkeypatch.setattr(guard._memory, "uses", uses)
    monkeypatch.setattr(guard._memory, "largest_process", lambda: os.getpid() + 1)
    guard._watch()
    assert (len(polls) > 1) is waits
