"""The bubble benchmark's table, from two real ranks. What it measures is judged in ``tests/mpi/test_bubble.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bubble.py"


def test_it_prints_measured_beside_predicted() -> None:
    words = ["--stages", "2", "--micro-batches", "4", "--pass-ms", "5", "--tries", "1"]
    done = subprocess.run([sys.executable, str(PROGRAM), *words], stdout=subprocess.PIPE, timeout=300, check=True)
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert [row[:4] for row in rows[1:]] == [
        ["gpipe", "2", "4", "1"],
        ["1f1b", "2", "4", "1"],
        ["zero_bubble", "2", "4", "1"],
        ["interleaved", "2", "4", "2"],
    ]
    assert [row[5] for row in rows[1:]] == ["0.2500", "0.2500", "0.0833", "0.1250"]
    assert all(float(row[4]) > 0 and float(row[6]) > float(row[5]) for row in rows[1:])


def test_one_stage_is_refused() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--stages", "1"], stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 2 and b"valid: 2 or more" in done.stderr
