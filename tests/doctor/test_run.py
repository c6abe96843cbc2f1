"""What happened to a run, told from what it left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.doctor.run import diagnose, rank_words
from fugaku_gpt.errors import UsageError
from tests.doctor.flights import Call, write_flight
from tests.sweep.fake import leave_run

SUM: Call = ("tp", "all_reduce", "parallel/tensor.py:10", True)
HELD: Call = ("tp", "all_reduce", "parallel/tensor.py:10", False)
GRADIENTS: Call = ("dp", "all_reduce", "parallel/gradients.py:20", False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), status=None)
    return tmp_path / "run"


def test_a_hang_names_who_waits_where_and_who_is_behind(run: Path) -> None:
    for rank in (0, 1, 3):
        write_flight(run / "flight", rank, 4, [SUM, SUM, GRADIENTS])
    write_flight(run / "flight", 2, 4, [SUM, SUM])
    told = diagnose(run)
    assert told.result.startswith("no result: still running, or killed")
    assert told.last == "iteration 4, loss 4.0000, 0.5 s per iteration"
    assert [(p.ranks, p.sequence, p.inside) for p in told.positions] == [((2,), 2, False), ((0, 1, 3), 3, True)]
    assert told.findings == [
        "ranks 0-1, 3 in all_reduce of [4, 8] on dp at parallel/gradients.py:20 (call 3), not returned",
        "rank 2 behind by 1 calls: last was all_reduce of [4, 8] on tp at parallel/tensor.py:10 (call 2), "
        "returned from it, and did not come to the next",
    ]


def test_ranks_in_different_calls_are_told_apart(run: Path) -> None:
    write_flight(run / "flight", 0, 2, [SUM, GRADIENTS])
    write_flight(run / "flight", 1, 2, [SUM, HELD])
    assert [position.communicator for position in diagnose(run).positions] == ["dp", "tp"]
    assert len(diagnose(run).findings) == 2


def test_a_rank_that_has_left_the_call_and_one_that_made_none(run: Path) -> None:
    write_flight(run / "flight", 0, 3, [SUM])
    write_flight(run / "flight", 1, 3, [HELD])
    write_flight(run / "flight", 2, 3, [])
    findings = diagnose(run).findings
    assert "rank 0 returned from all_reduce" in findings[2] and "others are still in" in findings[2]
    assert findings[1].startswith("rank 2 behind by 1 calls: last was no call yet")


def test_missing_ranks_and_the_ring(run: Path) -> None:
    write_flight(run / "flight", 1, 4, [SUM] * 600)
    told = diagnose(run)
    assert told.missing == [0, 2, 3] and told.positions[0].sequence == 600
    assert told.findings[0].startswith("ranks 0, 2-3 left no record")
    assert told.findings[1].startswith("no rank was inside an MPI call")


def test_a_run_that_ended_well_needs_no_explanation(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"))
    write_flight(tmp_path / "run" / "flight", 0, 1, [SUM])
    told = diagnose(tmp_path / "run")
    assert told.result == "ok (4 iterations)" and told.findings == [] and len(told.positions) == 1


def test_one_rank_or_none_left_no_recorder(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    told = diagnose(run)
    assert told.last == "no iteration was finished" and told.findings[0].startswith("no flight recorders")


def test_foreign_folders_and_damaged_files_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        diagnose(tmp_path / "none")
    with pytest.raises(UsageError, match="not a run directory: it has no config.yaml"):
        diagnose(tmp_path)
    path = write_flight(run / "flight", 0, 1, [SUM])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cut short"):
        diagnose(run)
    path.write_bytes(b"something else" * 10)
    with pytest.raises(UsageError, match="not a flight recorder file"):
        diagnose(run)


def test_ranks_in_words() -> None:
    assert rank_words([3]) == "rank 3" and rank_words([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
