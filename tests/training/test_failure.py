"""Tests that a rank that fails ends the others, even if the failure cannot be recorded."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.errors import EXIT_RUN_FAILED, CallsDisagree, UsageError
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.failure import end_failed_run


def test_an_error_that_cannot_be_recorded_is_printed_before_all_ranks_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: List[Tuple[int, bool]] = []

    def abort(_: Communicator, code: int) -> None:
        ended.append((code, "rank 1 makes another call" in capfd.readouterr().err))

    monkeypatch.setattr(Communicator, "abort", abort)
    directory = RunDirectory(tmp_path)
    directory.metrics_file.mkdir()  # cannot be read
    with pytest.raises(UsageError, match="cannot be read"):
        try:
            raise CallsDisagree("rank 1 makes another call")
        except CallsDisagree as error:
            end_failed_run(directory, Communicator.alone("world"), 0.0, error)
    assert ended == [(EXIT_RUN_FAILED, True)]
