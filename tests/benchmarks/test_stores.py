"""Test of the benchmark of stores of runs, at a size of no interest."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.jobs.store import list_runs
from tests.benchmarks.programs import printed_lines, refusal


@pytest.mark.slow
def test_each_call_has_a_row_and_the_store_is_valid(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "runs"
    arguments = ["--runs", "7", "--turns", "1", "--store", str(store), "--only", "find,ls-anew,ls"]
    lines = printed_lines(capfd, "stores", *arguments)
    assert [line.split()[0] for line in lines[2:]] == ["find", "ls-anew", "ls"]
    runs = list_runs(store).runs
    assert len(runs) == 7 and {run.status for run in runs} == {"ok"} and {run.problem for run in runs} == {""}


def test_unknown_calls_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--runs and --turns are at least 1" in refusal(capfd, "stores", "--runs", "0")
