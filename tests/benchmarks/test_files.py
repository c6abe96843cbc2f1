"""The run and sweep files that ship, and the step benchmark on a model of no size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.sweep.expand import expand_sweep

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "runs").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_run_file_is_valid(file: Path) -> None:
    assert load_run_config(file).layout.ranks >= 1


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_sweep_expands(file: Path) -> None:
    assert expand_sweep(file, ()) is not None


def test_the_step_benchmark_prints_its_table() -> None:
    small = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab_size=64", "model.seq_len=16"]
    words = [word for setting in small for word in ("--set", setting)]
    command = [sys.executable, str(BENCHMARKS / "step.py"), "--preset", "tiny", "--pairs", "1", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True)
    lines = done.stdout.decode().splitlines()
    assert "matrix-multiply peak measured" in lines[1]
    assert [line.split()[0] for line in lines[3:5]] == ["ours", "textbook"]
    assert "x as fast (pairs: " in lines[5] and "x the memory" in lines[5]


def test_the_overlap_benchmark_prints_a_row_for_each_stage_of_zero() -> None:
    small = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab_size=64", "model.seq_len=16"]
    words = [word for setting in small for word in ("--set", setting)]
    command = [sys.executable, str(BENCHMARKS / "overlap.py"), "--steps", "2", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True)
    head, *rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert head[-1] == "hidden" and [row[0] for row in rows] == ["0", "1"]
    assert all(float(row[1]) > 0 and 0 <= float(row[-1]) <= 1 for row in rows)
