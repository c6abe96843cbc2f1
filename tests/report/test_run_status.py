"""Tests of what is shown of a run that is followed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.jobs.outcome import Outcome
from fugaku_gpt.jobs.poll import PolledRun
from fugaku_gpt.records.job import RUNNING, JobStatus
from fugaku_gpt.report.page_runs import PageRun
from fugaku_gpt.report.run_status import ASCII_LEVELS, sparkline, status_of
from tests.sweep.fake import ITERATIONS, leave_run


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 10, ""),
        ([1.0, 2.0], 0, ""),
        ([3.0], 10, "▁"),
        ([2.0, 2.0, 2.0], 10, "▁▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 10, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
        ([0.0, 2.0, 4.0, 6.0, 1.0, 1.0], 3, "▁█▁"),
        ([7.0, math.nan, math.inf, 0.0], 4, "█  ▁"),
        ([math.nan, math.nan], 5, "  "),
    ],
)
def test_a_curve_has_a_character_for_each_column(values: List[float], width: int, curve: str) -> None:
    assert sparkline(values, width) == curve


def test_a_long_curve_fits_and_can_be_ascii() -> None:
    values = [1.0 - number / 1e5 for number in range(10**5)]
    curve = sparkline(values, 80)
    assert len(curve) == 80 and curve[0] == "█" and curve[-1] == "▁" and sorted(curve, reverse=True) == list(curve)
    assert sparkline([1.0, 0.0], 9, ASCII_LEVELS) == "#_"


def read(path: Path) -> PageRun:
    run = PageRun(path, path.name)
    while run.poll():
        pass
    assert run.read_facts()
    return run


def test_a_run_that_has_ended_has_no_time_that_remains(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", load_run_config(preset="tiny", overrides=["training.iterations=4", "layout.tp=2"]))
    status = status_of(read(tmp_path / "a"))
    assert status.line() == (
        "a | ok | 2 ranks | iteration 4/4 | loss 4 | validation 4.5 at 4 | 0.25 GiB/rank"
    )  # what the lines of this run do not have is not there


def test_a_running_run_has_an_eta_by_its_newest_lines(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", load_run_config(preset="tiny"), status=None, pace=30.0)  # claimed by this process
    status = status_of(read(tmp_path / "a"))
    assert status.status == "running" and status.remaining == 30.0 * (100 - ITERATIONS)
    assert status.progress() == "1 rank  iteration 4/100  ETA 0:48:00"


def test_a_failure_has_its_cause(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", load_run_config(preset="tiny"), "failed", "rank 3:\n\x1b[2J killed")
    status = status_of(read(tmp_path / "a"))
    assert status.status == "failed" and status.reason == "rank 3: \\x1b[2J killed"
    with open(tmp_path / "a" / "metrics.jsonl", "a", encoding="utf-8") as stream:
        stream.write("damage\n{}\n")
    assert status_of(read(tmp_path / "a")).reason.endswith("; 1 damaged lines in metrics.jsonl are left out")


def test_a_job_has_the_state_of_its_scheduler(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", load_run_config(preset="tiny"), status=None)
    polled = PolledRun(tmp_path / "a", Outcome("", RUNNING), "pjm", "4711", 2, 3, JobStatus("4711", RUNNING, raw="RNE"))
    run = read(tmp_path / "a")
    assert status_of(run, polled).job == "job 4711 (2 of 3) running RNE"
    silent = replace(polled, chain=1, unanswered={"job 4711": "no answer\nwithin 60 s"})
    assert status_of(run, silent).job == "job 4711 running RNE, job 4711: no answer within 60 s"
    assert status_of(run, PolledRun(tmp_path / "a", Outcome("", ""))).job == ""
