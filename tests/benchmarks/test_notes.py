"""What the notes' own rows say to their conclusions."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "notes.py"


def test_conclusions_hold_where_their_rows_can_tell() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--format", "csv"], stdout=subprocess.PIPE, check=True)
    rows = {row["conclusion"]: row for row in csv.DictReader(io.StringIO(done.stdout.decode()))}
    clock = rows["2.2 GHz is faster than 2.0 GHz"]
    assert (clock["configurations"], clock["verdict"], clock["holds"]) == ("4", "faster", "yes")
    assert clock["B/A"] == "0.861"
    builds = rows["PyTorch 1.10 is faster than 1.7"]
    assert (builds["verdict"], builds["holds"]) == ("undecided", "cannot be told")
    assert builds["smallest and largest"] == "0.613 to 2.131"
    # one run each has no interval
    assert rows["four ranks on a node are faster than one"]["95 % interval"] == ""
    assert rows["tcmalloc is faster (PyTorch 1.10, up to 64 nodes)"]["holds"] == "yes"
