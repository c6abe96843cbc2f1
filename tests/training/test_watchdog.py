"""The watchdog ends a process that stands still, whatever state the files are in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fugaku_gpt.records.flight import flight_file
from fugaku_gpt.records.run import HUNG, RunDirectory

HANGS = """
import sys, time
from pathlib import Path
from fugaku_gpt.comm import FlightRecorder
from fugaku_gpt.records.flight import FORWARD
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.watchdog import Watchdog
directory = RunDirectory(Path(sys.argv[1]))
recorder = FlightRecorder(directory.flight_dir, 0, 1)
recorder.progress(FORWARD, 3, 0)
Watchdog(recorder, directory, 0.5, time.time()).start()
time.sleep(120)
"""


def test_a_damaged_file_does_not_keep_a_hanging_rank_alive(tmp_path: Path) -> None:
    damaged = flight_file(tmp_path / "flight", 7)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a recorder's")
    done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, timeout=90, check=False)
    result = RunDirectory(tmp_path).result()
    assert done.returncode == 1 and result is not None and result.status == HUNG, done
    assert "rank-000007.flight: not a flight recorder file" in result.reason
    assert (tmp_path / "stacks" / "rank-000000.txt").exists()
