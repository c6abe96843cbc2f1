"""Tests of the flight recorder's benchmark: its table, from two real ranks, and its intervals."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.programs import printed_lines

import recorder  # isort: skip  # a module of benchmarks/

SMALL = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=64"]


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_recorder_benchmark_prints_a_row_for_each_layout_and_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--pairs", "2", "--steps", "1"]
    for setting in SMALL:
        arguments += ["--set", setting]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which this process caches
    rows = [line[12:].split() for line in printed_lines(capfd, "recorder", *arguments)[1:]]
    assert len(rows) == 3 and all(len(row) == 8 for row in rows)
    calls = [int(row[1]) for row in rows]
    assert calls[1] > calls[2] > calls[0] > 0  # tensor parallelism calls in every layer
    assert all(float(figure.rstrip("%")) > 0 for row in rows for figure in row[:6])
    assert not list(tmp_path.glob("recorder-*"))


def test_the_interval_covers_the_median_19_times_of_20() -> None:
    random = np.random.RandomState(7)
    covered = 0
    for _ in range(2000):
        low, high = recorder.median_interval(sorted(random.lognormal(0.0, 0.1, 40)))
        covered += low <= 1.0 <= high
    assert 0.93 < covered / 2000 < 0.98
