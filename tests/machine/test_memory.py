"""Tests of memory limits and the use under them, read from the system's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict

import pytest

from fugaku_gpt.machine.local import memory_limit
from fugaku_gpt.machine.memory import NodeMemory, control_groups, machine_use, private_and_shared_bytes
from fugaku_gpt.machine.system import System, use_system

MIB = 2**20


def write(folder: Path, files: Dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n", encoding="ascii")


@pytest.mark.parametrize(
    ("line", "limit", "usage", "inactive", "none"),
    [
        ("0::/job_7/step_0", "memory.max", "memory.current", "inactive_file", "max"),
        (
            "4:cpu,memory:/job_7/step_0", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
            "9223372036854771712",
        ),
    ],
)  # fmt: skip
def test_the_limits_around_a_process_are_read(
    tmp_path: Path, line: str, limit: str, usage: str, inactive: str, none: str
) -> None:
    top = tmp_path / "sys" / "fs" / "cgroup" / ("memory" if "memory" in line else "")
    write(top / "job_7" / "step_0", {limit: none, usage: "5", "memory.stat": f"{inactive} 0"})
    job = {limit: str(900 * MIB), usage: str(500 * MIB), "memory.stat": f"cache 7\n{inactive} {100 * MIB}"}
    for name, text in job.items():
        (top / "job_7" / name).write_text(text + "\n", encoding="ascii")
    meminfo = "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB"
    write(tmp_path / "proc", {"meminfo": meminfo})
    write(tmp_path / "proc" / "self", {"cgroup": f"1:name=systemd:/\n{line}"})
    with use_system(System(tmp_path)):
        (group,) = control_groups()
        assert (group.limit, group.used()) == (900 * MIB, 400 * MIB)
    write(tmp_path / "none" / "proc", {"meminfo": meminfo})
    with use_system(System(tmp_path / "none")):
        assert control_groups() == []


def test_use_of_the_machine_includes_that_of_a_process() -> None:
    use = machine_use()
    own, shared = private_and_shared_bytes(os.getpid())
    assert 0 < own < use.used < use.limit and shared > 0 and memory_limit() <= use.limit
    assert private_and_shared_bytes(2**22 + 1) == (0, 0)


def test_the_limit_with_least_room_comes_first() -> None:
    own, shared = private_and_shared_bytes(os.getpid())
    first = NodeMemory([os.getpid()], limit=own + shared + 10 * MIB).uses()[0]
    assert first.source == "node.memory_limit" and abs(first.used - own - shared) < 8 * MIB
    assert NodeMemory([os.getpid(), 1]).largest_process() == os.getpid()
