"""Tests of facts of this machine, which are read and never set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_gpt.config import NodeConfig
from fugaku_gpt.machine import local
from fugaku_gpt.machine.system import System, use_system


def test_facts_are_plausible() -> None:
    assert set(local.usable_cores()) == os.sched_getaffinity(0)
    assert 2**26 < local.resident_bytes() + 2**26 < local.memory_limit()
    assert 0 < local.node_used_bytes() < 2**50
    assert local.out_of_memory_kills() >= 0
    assert local.processor_name()
    assert all(isinstance(flag, str) for flag in local.vector_flags())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 12\nCPU implementer\t: 0x46\nCPU part\t: 0x001\n", local.A64FX),
        (
            "model name\t: ARMv8 Processor rev 0 (v8l)\nCPU implementer\t: 0x46\nCPU part\t: 0x001\n",
            local.A64FX,
        ),
        ("model name\t: MONAKA\nCPU implementer\t: 0x46\nCPU part\t: 0x003\n", "MONAKA"),
        ("processor\t: 0\nmodel name\t: ARMv8 Processor rev 1 (v8l)\nCPU implementer\t: 0x41\n",
         "ARMv8 Processor rev 1 (v8l)"),
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9B14\n", "AMD EPYC 9B14"),
    ],
)  # fmt: skip
def test_the_processor_is_named_by_its_model_or_its_maker(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(text)
    with use_system(System(tmp_path)):
        assert local.processor_name() == name


def test_power_knobs_are_read_from_the_resources_that_pjm_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJM_CUSTOM_RESOURCES", "freq=2200,eco_state=0,retention_state=0,odd")
    assert local.job_resources() == {"freq": "2200", "eco_state": "0", "retention_state": "0"}
    assert local.clock_mhz() == 2200
    toggles = {toggle.name: toggle for toggle in local.read_back_toggles(NodeConfig(freq_mhz=2200, retention_state=1))}
    assert toggles["freq_mhz"].applied and not toggles["retention_state"].applied
    assert toggles["retention_state"].seen == "0"


def test_knobs_that_a_simulated_pjm_grants_are_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJM_CUSTOM_RESOURCES", "eco_state=2")
    monkeypatch.setenv("FUGAKU_GPT_SIMULATOR", "1")
    (toggle,) = local.read_back_toggles(NodeConfig(eco_state=2))
    assert not toggle.applied and toggle.seen == "no such control here"


def test_toggles_without_a_control_are_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJM_CUSTOM_RESOURCES", raising=False)
    monkeypatch.setattr(local, "clock_mhz", lambda: None)
    toggles = local.read_back_toggles(NodeConfig(tcmalloc=True, freq_mhz=2200, retention_state=0))
    assert [toggle.applied for toggle in toggles] == [False, False, False]
    assert [toggle.seen for toggle in toggles] == ["libc", "clock not fixed", "no such control here"]
    assert local.read_back_toggles(NodeConfig()) == []


def test_every_other_toggle_is_checked_against_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJM_CUSTOM_RESOURCES", "eco_state=2,throttling_state=5")
    library = next(path for path in _libraries() if path.startswith("/"))
    node = NodeConfig(
        eco_state=2, throttling_state=4, preload=(library, "/no/such.so"), large_pages="hugetlbfs", open_files=64
    )
    seen = [(toggle.name, toggle.applied) for toggle in local.read_back_toggles(node)]
    assert seen == [
        ("preload", True), ("preload", False), ("eco_state", True), ("throttling_state", False),
        ("large_pages", False), ("open_files", True),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_preloaded_library_is_seen_in_the_process(tmp_path: object) -> None:
    """Any shared object under the allocator's name will do: what counts is that it is mapped."""
    folder = str(tmp_path)
    source = next(path for path in _libraries() if os.path.basename(path).startswith(("libm.so", "libm-")))
    with open(source, "rb") as stream, open(os.path.join(folder, "libtcmalloc.so.4"), "wb") as copy:
        copy.write(stream.read())
    program = "from fugaku_gpt.machine import local; print(local.allocator_in_use())"
    environment = {**os.environ, "LD_PRELOAD": os.path.join(folder, "libtcmalloc.so.4")}
    output = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert output.decode().strip() == "libtcmalloc.so.4"


def _libraries() -> "list[str]":
    with open("/proc/self/maps", encoding="utf-8") as stream:
        return [line.split()[-1] for line in stream if ".so" in line]


def test_the_cores_of_this_machine_are_in_some_group() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert sorted(core for group in local.group_by_numa_node(cores) for core in group) == cores
    nodes = {
        path.parent.name for core in cores for path in Path("/sys/devices/system/node").glob(f"node[0-9]*/cpu{core}")
    }
    assert [f"node{node}" for node in local.numa_nodes_of(cores)] == sorted(nodes, key=lambda name: int(name[4:]))


def test_cores_are_grouped_by_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {0: 1, 1: 0, 2: 1, 3: None}
    monkeypatch.setattr(local, "_numa_node_of", nodes.get)
    assert local.group_by_numa_node([0, 1, 2, 3]) == [[3], [1], [0, 2]]
    assert local.numa_nodes_of([0, 1, 2, 3]) == [0, 1] and local.numa_nodes_of([3]) == []


def test_the_seconds_that_threads_wait_for_a_core_are_counted(tmp_path: Path) -> None:
    """The second of schedstat's three numbers, of all threads; one that has ended meanwhile has no file."""
    for thread, text in ((7, "900 2000000000 5\n"), (8, "1 500000000 2\n"), (9, None)):
        folder = tmp_path / f"proc/self/task/{thread}"
        folder.mkdir(parents=True)
        if text:
            (folder / "schedstat").write_text(text)
    with use_system(System(tmp_path)):
        assert local.seconds_without_core() == 2.5
    with use_system(System(tmp_path / "none")):
        assert local.seconds_without_core() is None
