"""Tests of the bubble benchmark's table, from two real ranks. ``tests/mpi/test_bubble.py`` tests its figures."""

from __future__ import annotations

import pytest

from tests.benchmarks.programs import printed_lines, refusal


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_bubble_benchmark_prints_measured_beside_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--stages", "2", "--micro-batches", "4", "--pass-ms", "5", "--tries", "1"]
    rows = [line.split() for line in printed_lines(capfd, "bubble", *arguments)]
    assert [row[:4] for row in rows[1:]] == [
        ["gpipe", "2", "4", "1"],
        ["1f1b", "2", "4", "1"],
        ["zero_bubble", "2", "4", "1"],
        ["interleaved", "2", "4", "2"],
    ]
    assert [row[5] for row in rows[1:]] == ["0.2500", "0.2500", "0.0833", "0.1250"]
    assert all(float(row[4]) > 0 and float(row[6]) > float(row[5]) for row in rows[1:])


@pytest.mark.slow  # imports PyTorch
def test_a_single_stage_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert "valid: 2 or more" in refusal(capfd, "bubble", "--stages", "1")
