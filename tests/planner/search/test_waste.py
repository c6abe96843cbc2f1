"""Tests of waste findings: each waste is named with its size, and layouts without waste have no findings."""

from __future__ import annotations

from typing import List

from fugaku_gpt.config import load_run_config
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.run_time import run_to_row
from fugaku_gpt.planner.search.rank_map import choose_node_box, choose_rank_map
from fugaku_gpt.planner.search.waste import find_waste

EVEN = [
    "layout.dp=432", "layout.tp=4", "job.nodes=432", "node.ranks_per_node=4", "training.micro_batch=3",
    "training.global_batch=1296", "model.heads=16",
]  # fmt: skip


def _waste(machine_name: str, *settings: str, preset: str = "1.3b") -> List[str]:
    config = load_run_config(None, preset, [*settings])
    machine = load_machine(machine_name)
    torus = choose_node_box(config.job.nodes) if machine_name == "a64fx" else None
    rank_map = choose_rank_map(torus, config.layout, config.ranks_per_node) if torus is not None else None
    return find_waste(config, machine, run_to_row(config, machine), torus, rank_map)


def _only_finding(findings: List[str], text: str) -> str:
    (match,) = [finding for finding in findings if text in finding]
    return match


def test_a_layout_whose_sizes_fill_everything_has_none() -> None:
    assert _waste("a64fx", *EVEN) == []


def test_heads_that_do_not_fill_vectors() -> None:
    """7176 in 78 heads: 92 wide, six vectors of 16 for 5.75."""
    shape = ["model.hidden=7176", "model.heads=78", "layout.tp=6", "layout.dp=432", "job.nodes=432"]
    findings = _waste("a64fx", *shape, "node.ranks_per_node=6", "training.global_batch=432")
    assert "hidden/heads 92 is no multiple of 16 (512-bit vectors): 4.3%" in _only_finding(findings, "hidden/heads")
    assert not [finding for finding in findings if finding.startswith("hidden 7176")]  # half a vector of 449 is nothing


def test_products_of_attention_that_leave_threads_idle() -> None:
    assert "(heads/TP)*MBS = 4 on 12 threads of a rank: 67% of them idle" in _only_finding(
        _waste("a64fx", *EVEN, "training.micro_batch=1"), "heads/TP"
    )


def test_nodes_that_are_rounded_up_and_groups_over_nodes() -> None:
    findings = _waste("a64fx", "layout.dp=128", "layout.tp=4", "job.nodes=512", "node.ranks_per_node=1")
    assert "2x8x32 takes at least 528, 3.1% more to pay" in _only_finding(findings, "to pay")
    assert "tensor-parallel groups span nodes up to 2 apart: TP 4 on 1 ranks a node" in _only_finding(
        findings, "span nodes"
    )


def test_a_bubble() -> None:
    findings = _waste("a64fx", "layout.dp=4", "layout.pp=4", "job.nodes=16", "training.global_batch=32")
    assert "4 stages, 1 chunks, 8 micro-batches: 38%" in _only_finding(findings, "bubble")


def test_tiles_and_tensor_cores_of_a_gpu() -> None:
    sizes = ["model.hidden=5124", "model.heads=42", "layout.dp=8", "training.global_batch=64"]
    findings = _waste("a100", *sizes)
    assert "hidden/heads 122 is no multiple of 8" in _only_finding(findings, "hidden/heads")
    assert "in waves of 108" in _only_finding(findings, "layers' products")
    assert not [finding for finding in findings if "nodes" in finding]


def test_each_width_that_does_not_fill_vectors_has_a_line() -> None:
    """Vectors of 16: 18 are 32, 72 are 80, and of 100 / 4 = 25 columns of the vocabulary 32."""
    shape = [
        "model.hidden=288",
        "model.heads=16",
        "model.ffn_hidden=400",
        "model.vocab_size=100",
        "model.vocab_multiple=1",
    ]
    lines = [line for line in _waste("a64fx", *EVEN, *shape) if "512-bit vectors" in line]
    assert [line.partition(" is no multiple of 16 (512-bit vectors): ")[::2] for line in lines] == [
        ("hidden/heads 18", "77.8% of them empty"),
        ("hidden/TP 72", "11.1% of them empty"),
        ("4*hidden/TP 100", "12.0% of them empty"),
        ("vocab/TP 25", "28.0% of them empty"),
    ]


def test_each_width_that_misses_the_tensor_cores_has_a_line() -> None:
    shape = ["model.hidden=240", "model.heads=20", "model.vocab_size=100", "model.vocab_multiple=1", "layout.tp=4"]
    lines = [line.partition(" is no multiple of 8")[0] for line in _waste("a100", *shape) if "tensor cores" in line]
    assert lines == ["hidden/heads 12", "hidden/TP 60", "vocab/TP 25"]
