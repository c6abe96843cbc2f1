"""Tests of the shipped run and sweep files, and of the step and overlap benchmarks on a minimal model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.sweep.expand import expand_sweep
from tests.benchmarks.programs import printed_lines, refusal

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "runs").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_run_file_is_valid(file: Path) -> None:
    assert load_run_config(file).layout.ranks >= 1


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_sweep_expands(file: Path) -> None:
    assert expand_sweep(file, ()) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "contestants",
    [
        ["floor", "ours"],
        pytest.param(
            ["floor", "ours", "textbook-tanh", "ours-bf16", "hf", "textbook-bf16"], marks=pytest.mark.long, id="all"
        ),
    ],
)
def test_the_step_benchmark_prints_a_table(
    contestants: List[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab_size=64", "model.seq_len=128"]
    arguments = [argument for setting in [*small, "node.threads_per_rank=1"] for argument in ("--set", setting)]
    samples = tmp_path / "samples.json"
    arguments = [*contestants, "--preset", "tiny", "--turns", "1", *arguments, "--products", "--samples", str(samples)]
    lines = printed_lines(capfd, "step", *arguments)
    report = json.loads(samples.read_text(encoding="utf-8"))
    lacking = {line.split(":")[0] for line in lines[1:] if ": not on this build: " in line}
    names = [name for name in contestants if name not in lacking]
    assert lacking <= {"hf", "textbook-bf16", "ours-bf16"}
    first = 2 + len(lacking)
    assert [line.split()[0] for line in lines[first : first + len(names)]] == names
    assert len(report["turns"]) == 1 and all(set(turn) == set(names) for turn in report["turns"])
    # all have learned from the same batch: the loss of equally likely tokens, of 64 or, with padding, 128
    losses = [turn[name]["value"] for turn in report["turns"] for name in names[1:]]
    assert all(4.0 < loss < 5.0 for loss in losses)
    rows = report["turns"][0]["floor"]["value"]["products"]
    assert len(rows) == 18 and all(f"\n{product} " in "\n".join(lines) for product in rows)


def test_the_step_benchmark_lists_the_valid_contestants(capfd: pytest.CaptureFixture[str]) -> None:
    assert "theirs: no such contestant; valid: one of floor, ours," in refusal(capfd, "step", "theirs")


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_overlap_benchmark_prints_a_row_for_each_stage_of_zero(capfd: pytest.CaptureFixture[str]) -> None:
    # 2 MiB: sums that take less than the printed precision, 0.1 ms, would be 0.0
    small = ["model.layers=2", "model.hidden=128", "model.heads=2", "model.vocab_size=1024", "model.seq_len=16"]
    arguments = [argument for setting in small for argument in ("--set", setting)]
    head, *rows = [line.split() for line in printed_lines(capfd, "overlap", "--steps", "2", *arguments)]
    assert head[-1] == "hidden" and [row[0] for row in rows] == ["0", "1"]
    assert all(float(row[1]) > 0 and 0 <= float(row[-1]) <= 1 for row in rows)
