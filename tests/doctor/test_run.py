"""Tests of reports on how a run ended, made of the files that it left."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run as run_command_line
from fugaku_gpt.config import load_run_config
from fugaku_gpt.doctor.run import diagnose
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.records.run import FAILED, Result
from tests.doctor.flights import Ranks
from tests.sweep.fake import leave_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), status=None)
    return tmp_path / "run"


def test_a_run_without_a_result_is_reported_with_the_last_iteration_and_the_cause(run: Path) -> None:
    ranks = Ranks(run / "flight", 3, {"dp": [(0, 1, 2)]})
    ranks.progress(range(3), step=5)
    ranks.call((0, 2), "dp", "sum.py:3", returns=False)
    ranks.stand_still(40.0)
    diagnosis = diagnose(run)
    assert diagnosis.result.startswith("no result: still running, or killed")
    assert diagnosis.last == "iteration 4, loss 4.0000, 0.5 s per iteration"
    assert diagnosis.findings[0].startswith("rank 1 is the cause: it is busy outside MPI")
    assert diagnosis.findings[1] == f"`fugaku-gpt doctor hang {run}` shows which ranks wait for which"
    ranks.recorders[1].path.unlink()
    assert diagnose(run).findings[1] == "rank 1 left no record"


def test_a_run_that_ended_well_needs_no_explanation(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"))
    Ranks(tmp_path / "run" / "flight", 1, {})
    diagnosis = diagnose(tmp_path / "run")
    assert diagnosis.result == "ok (4 iterations)" and diagnosis.findings == []


def test_nothing_was_recorded(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    diagnosis = diagnose(run)
    assert diagnosis.last == "no iteration was finished" and diagnosis.findings[0].startswith("no flight recorders")


def test_a_failure_is_reported_with_the_node_and_the_checkpoint_from_which_the_run_resumes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result(
        FAILED, "ValueError: bad batch", 1.0, 2.0, 3, rank=1, node="fn07", last_checkpoint="iteration-00000002"
    )
    write_json_atomically(run / "result.json", asdict(result))
    diagnosis = diagnose(run)
    assert (diagnosis.node, diagnosis.last_checkpoint) == ("fn07", "iteration-00000002")
    assert diagnosis.findings == []  # the result names the cause: that there is no flight recorder is no news
    assert run_command_line(["doctor", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "result: failed: ValueError: bad batch (3 iterations)",
        "last: iteration 4, loss 4.0000, 0.5 s per iteration",
        "node: fn07",
        "last checkpoint: iteration-00000002",
    ]


def test_foreign_folders_and_damaged_files_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        diagnose(tmp_path / "none")
    with pytest.raises(UsageError, match="not a run directory: it has no config.yaml"):
        diagnose(tmp_path)
    path = Ranks(run / "flight", 1, {}).recorders[0].path
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cut short"):
        diagnose(run)
