"""Tests that a rank that fails ends the others, even if the failure cannot be recorded."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import List, Optional, Tuple

import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.errors import EXIT_RUN_FAILED, CallsDisagree, ReplicasDiffer
from fugaku_gpt.records.run import FAILED, RunDirectory
from fugaku_gpt.training.failure import end_failed_run


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> List[Tuple[int, str]]:
    """The exit code with which all ranks were ended, and the text that was printed by then."""
    ended: List[Tuple[int, str]] = []
    monkeypatch.setattr(Communicator, "abort", lambda _, code: ended.append((code, capfd.readouterr().err)))
    return ended


def end_with(directory: RunDirectory, error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        end_failed_run(directory, Communicator.alone("world"), 0.0, error)


def test_metrics_that_cannot_be_read_do_not_hide_why_a_run_has_failed(
    tmp_path: Path, aborts: List[Tuple[int, str]]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.mkdir()
    end_with(directory, CallsDisagree("rank 1 makes another call"))
    ((code, printed),) = aborts
    assert code == EXIT_RUN_FAILED and printed.startswith("fugaku-gpt: rank 0: rank 1 makes another call\n")
    result = directory.result()
    assert result is not None and result.reason == "rank 0: rank 1 makes another call"


def test_an_error_that_cannot_be_recorded_is_printed_before_all_ranks_are_ended(
    tmp_path: Path, aborts: List[Tuple[int, str]]
) -> None:
    folder = tmp_path / "gone"
    end_with(RunDirectory(folder), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{folder}/metrics.jsonl"))
    (code, printed), *rest = aborts
    assert code == EXIT_RUN_FAILED and not rest
    assert printed.splitlines() == [
        f"fugaku-gpt: rank 0: {folder}/metrics.jsonl: cannot be read or written: No space left on device",
        f"  on {socket.gethostname()}, last iteration 0, last checkpoint: none",
        f"  how the run ended is not recorded: {folder}/result.json: cannot be read or written: "
        "No such file or directory",
    ]


@pytest.mark.parametrize(("rank", "node"), [(3, "c01-0007"), (None, "")])
def test_silent_corruption_is_recorded_with_the_rank_and_host_that_have_it(
    tmp_path: Path, rank: Optional[int], node: str
) -> None:
    directory = RunDirectory(tmp_path)
    end_with(directory, ReplicasDiffer("iteration 8: silent corruption: rank 3", rank, node))  # on all ranks: no abort
    result = directory.result()
    assert result is not None and (result.status, result.rank, result.node) == (FAILED, rank, node)
    assert result.reason == "iteration 8: silent corruption: rank 3"
