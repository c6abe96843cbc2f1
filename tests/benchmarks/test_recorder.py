"""The flight recorder's benchmark: its table, from two real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "recorder.py"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=64"]


def test_it_prints_a_row_for_each_layout_and_leaves_nothing(tmp_path: Path) -> None:
    words = ["--pairs", "2", "--steps", "1"]
    for setting in SMALL:
        words += ["--set", setting]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=300, check=True)
    rows = [line[12:].split() for line in done.stdout.decode().splitlines()[1:]]
    assert len(rows) == 3 and all(len(row) == 7 for row in rows)
    calls = [int(row[1]) for row in rows]
    assert calls[1] > calls[2] > calls[0] > 0  # tensor parallelism calls in every layer
    assert all(float(figure.rstrip("%")) > 0 for row in rows for figure in row[:6])
    assert not list(tmp_path.glob("recorder-*"))
