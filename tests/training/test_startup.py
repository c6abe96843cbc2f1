"""Tests of the start-up block, which describes the software and the machine that a run really uses."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any, Dict, List

import numpy as np
import pytest
import torch

import fugaku_gpt
from fugaku_gpt import compat, ops
from fugaku_gpt.comm import ProcessGrid, mpi_facts
from fugaku_gpt.machine import local
from fugaku_gpt.records.text import spans
from fugaku_gpt.training.startup import (
    collect_environment,
    describe_environment,
    keep_freed_pages,
    prepare_process,
)
from tests.support.tiny import tiny_config


def environment(*overrides: str) -> Dict[str, Any]:
    """The environment of this process, as rank 0 of a run would record it."""
    return collect_environment(tiny_config(*overrides), ProcessGrid.alone(), prepare_process(1))


def test_preparing_a_process_reports_the_settings_that_took_effect() -> None:
    process = prepare_process(1)
    assert process["threads"] == torch.get_num_threads() == 1
    assert process["allocator"] == local.allocator_in_use()
    assert process["allocator_keeps_pages"] is keep_freed_pages()
    if process["flush_denormals"]:
        assert float((torch.tensor([1e-30]) * 1e-10)[0]) == 0.0


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], "attention, LayerNorm, GELU, loss, AdamW"),
        (["model.norm=rmsnorm", "model.mlp=swiglu"], "attention, RMSNorm, SwiGLU, loss, AdamW"),
        (["model.positions=rope"], "attention, LayerNorm, rotary positions, GELU, loss, AdamW"),
        (["model.qk_norm=true"], "attention, LayerNorm, RMSNorm, GELU, loss, AdamW"),
    ],
)
def test_the_block_names_the_operators_of_the_model_that_our_own_kernels_compute(
    overrides: List[str], names: str
) -> None:
    facts = environment(*overrides)
    for is_compiled in (True, False):
        facts["precision"]["compiled"] = is_compiled
        lines = [line for line in describe_environment(facts) if "our own compiled kernels" in line]
        assert [line.split(" by our")[0] for line in lines if "in place of" not in line] == [names] * is_compiled


_HEAP = """
import ctypes, json, torch
from fugaku_gpt.training.startup import mmap_large_allocations, prepare_process

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo.restype = Info

def mapped():
    return libc.mallinfo().hblks

differences, keeps = [], {keeps}
if keeps:
    keeps = prepare_process(1)["allocator_keeps_pages"]
before = mapped()
with mmap_large_allocations():
    lasting = torch.zeros(2**20)
    differences.append(mapped() - before)
passing = torch.zeros(2**20)
differences.append(mapped() - before)
try:
    with mmap_large_allocations():
        raise KeyError
except KeyError:
    another = torch.zeros(2**20)
differences.append(mapped() - before)
print(json.dumps([keeps, differences]))
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_lasting_allocations_lie_outside_of_a_heap_that_keeps_freed_pages(keeps: bool) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", _HEAP.replace("{keeps}", str(keeps))], env=environ, stdout=subprocess.PIPE, check=True
    )
    keeps_pages, mapped = json.loads(done.stdout)
    if keeps and not keeps_pages:
        pytest.skip("the allocator is not glibc's")
    assert mapped == ([1, 1, 1] if keeps else [1, 2, 3])


def test_the_environment_is_read_back_and_fits_into_json() -> None:
    facts = environment("node.freq_mhz=1", "node.retention_state=1")
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["python"] == platform.python_version() and facts["numpy"] == np.__version__
    assert facts["build"] == compat.build_facts() and facts["mpi"] == mpi_facts()
    assert facts["memory_limit_bytes"] > 2**28
    (rank,) = facts["ranks"]
    assert (rank["rank"], rank["process"], rank["threads"]) == (0, os.getpid(), 1)
    assert rank["affinity"] == sorted(os.sched_getaffinity(0))
    assert [(toggle["name"], toggle["applied"]) for toggle in facts["toggles"]] == [
        ("freq_mhz", False),
        ("retention_state", False),
    ]


def test_the_block_names_builds_threads_cores_mpi_and_toggles() -> None:
    facts = environment("node.freq_mhz=1", "node.tcmalloc=true")
    text = "\n".join(describe_environment(facts))
    mpi, first = facts["mpi"], facts["ranks"][0]
    for fragment in (
        f"fugaku_gpt {fugaku_gpt.__version__} (",
        f"torch {torch.__version__}: BLAS {facts['build']['blas']}",
        f"kernels for {facts['build']['instruction_set']}",
        f"processor {facts['processor']}",
        f"MPI {mpi['library']}, standard {mpi['standard']}, threads: {mpi['thread_level']}, mpi4py {mpi['mpi4py']}",
        f"rank 0 on {first['host']}: 1 threads on cores {spans(first['affinity'])}"
        + (f" of NUMA node {first['numa_nodes'][0]}" if len(first["numa_nodes"]) == 1 else ""),
        "denormals flushed ",
        "toggle freq_mhz=1: NOT applied (seen: ",
        "toggle tcmalloc=True: ",
    ):
        assert fragment in text, fragment


def test_many_ranks_are_shown_as_a_few_and_a_count() -> None:
    facts = environment()
    facts["ranks"] = [{**facts["ranks"][0], "rank": rank, "host": f"node{rank}"} for rank in range(100)]
    lines = describe_environment(facts)
    assert sum(line.startswith("rank ") for line in lines) == 8
    assert "... and 92 more ranks (all in environment.json)" in lines


def test_a_note_says_that_times_mean_little_if_ranks_share_cores() -> None:
    facts = environment()
    alone = facts["ranks"][0]
    facts["ranks"] = [{**alone, "rank": rank, "threads": 3, "affinity": [0, 1]} for rank in range(2)]
    assert f"note: 6 threads share 2 cores on {alone['host']}: times mean little here" in describe_environment(facts)
    facts["ranks"] = [{**alone, "rank": rank, "threads": 1, "affinity": [rank]} for rank in range(2)]
    assert not any(line.startswith("note: ") for line in describe_environment(facts))


@pytest.mark.parametrize("eco", ["1", "2"])
def test_a_node_with_one_pipe_is_reported_to_run_at_half_its_peak(monkeypatch: pytest.MonkeyPatch, eco: str) -> None:
    monkeypatch.setenv("PJM_CUSTOM_RESOURCES", f"freq=2200,eco_state={eco}")
    note = f"note: this node runs at half its peak: eco_state={eco} leaves its cores one floating-point pipe"
    assert note in describe_environment(environment())
    monkeypatch.setenv("PJM_CUSTOM_RESOURCES", "freq=2000,eco_state=0")
    assert not any("half its peak" in line for line in describe_environment(environment()))


def test_kernels_that_cannot_be_used_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "native_kernels_problem", lambda: "they compute wrong results: loss: 4 for 2")
    monkeypatch.setattr(ops, "uses_native_kernels", lambda: False)
    lines = describe_environment(environment())
    assert (
        "note: PyTorch's kernels in place of our own compiled ones: they compute wrong results: loss: 4 for 2; "
        "`fugaku-gpt env kernels` tries to mend that"
    ) in lines


def test_recompute_that_changes_nothing_is_reported() -> None:
    note = "note: training.recompute selective changes nothing"
    for dropout, expected in (("0", 1), ("0.1", 0)):
        facts = environment("training.recompute=selective", f"model.attention_dropout={dropout}")
        assert sum(line.startswith(note) for line in describe_environment(facts)) == expected
