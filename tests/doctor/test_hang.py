"""Tests of the report of a hang, from files of a run that ended and of a run that makes progress."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.doctor.hang import hang_report, report_lines
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.run import HUNG, Result, RunDirectory
from tests.doctor.flights import Ranks
from tests.sweep.fake import leave_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), status=None)  # of one rank
    return tmp_path / "run"


def test_the_report_begins_with_the_verdict_and_groups_equal_ranks(run: Path) -> None:
    ranks = Ranks(run / "flight", 40, {"world": [tuple(range(40))]})
    ranks.progress(range(40), step=5, micro_batch=2)
    ranks.call((rank for rank in range(40) if rank != 17), "world", "agree.py:3", shape=(6,), returns=False)
    (run / "stacks").mkdir()
    (run / "stacks" / "rank-000017.txt").write_text("a stack")
    RunDirectory(run).write_result(Result(HUNG, "rank 17 is the cause", 0.0, 1.0))
    report = hang_report(run)
    lines = report_lines(report)
    call = "all_reduce_sum of [6] on world at agree.py:3 (number 1 there; iteration 5, forward of micro-batch 2)"
    assert lines[0].startswith("rank 17 is the cause: it is busy outside MPI")
    assert lines[1].startswith("rank 17 ran on ") and f"process {os.getpid()}" in lines[1]
    assert lines[1].endswith(f"its Python stacks: {run}/stacks/rank-000017.txt")
    assert lines[3:5] == ["ranks that wait for others:", f"  ranks 0-16, 18-39 wait for rank 17 in {call}"]
    assert len(lines) == 11 and lines[8].startswith("  ranks 0-16, 18-39: iteration 5, forward of micro-batch 2; moved")
    assert lines[9:] == [
        "",
        "not compared with the plan of a step: config.yaml is another run's: it has 1 ranks, the recorders 40",
    ]
    assert lines[8].endswith(f"waits in {call}, for rank 17") and "outside, before its first call" in lines[7]


def test_a_run_that_makes_progress_is_no_hang(run: Path) -> None:
    ranks = Ranks(run / "flight", 2, {"world": [(0, 1)]})
    ranks.call((0,), "world", "agree.py:3", returns=False)
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.01):
            ranks.progress((1,), step=int(time.time()))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        report = hang_report(run)
    finally:
        stop.set()
        worker.join()
    assert report.verdict == "no hang: rank 1 moved just now" and report_lines(report) == [report.verdict]


def test_a_run_without_recorders_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match="no flight recorders: no rank made a call, or node.flight_recorder is"):
        hang_report(run)
