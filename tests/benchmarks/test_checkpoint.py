"""Test of the checkpoint benchmark's table, from two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.programs import printed_lines


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_checkpoint_benchmark_prints_a_row_for_each_way_of_saving_and_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # wider than the preset, since a copy of the preset's model may take less than the printed precision, 1 ms
    small = ["model.hidden=512", "model.layers=1", "model.seq_len=16"]
    arguments = ["--preset", "tiny", "--ranks", "2", "--steps", "1", "--saves", "1", "--folder", str(tmp_path)]
    arguments += [argument for setting in small for argument in ("--set", setting)]
    head, *rows = [line.split() for line in printed_lines(capfd, "checkpoint", *arguments)]
    assert [row[:2] for row in rows] == [
        ["0", "asynchronous"],
        ["0", "synchronous"],
        ["1", "asynchronous"],
        ["1", "synchronous"],
    ]
    assert all(float(figure) > 0 for row in rows for figure in (row[2], row[3], row[5], row[8], row[10]))
    assert list(tmp_path.iterdir()) == [] and "stall" in head
