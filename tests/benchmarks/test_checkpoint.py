"""The checkpoint benchmark's table, from two real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


def test_it_prints_a_row_for_each_way_of_saving_and_leaves_nothing(tmp_path: Path) -> None:
    # as wide as this, since a copy of the preset itself may take less than what is printed of a stall, 1 ms
    words = ["--preset", "tiny", "--set", "model.hidden=512", "--ranks", "2", "--steps", "1", "--saves", "1"]
    words += ["--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, str(PROGRAM), *words], stdout=subprocess.PIPE, timeout=300, check=True)
    head, *rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert [row[:2] for row in rows] == [
        ["0", "asynchronous"],
        ["0", "synchronous"],
        ["1", "asynchronous"],
        ["1", "synchronous"],
    ]
    assert all(float(figure) > 0 for row in rows for figure in (row[2], row[3], row[5], row[8], row[10]))
    assert list(tmp_path.iterdir()) == [] and "stall" in head
