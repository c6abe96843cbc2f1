"""Tests of the benchmark of traces: its table, from two real ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.benchmarks.programs import printed_lines
from tests.benchmarks.test_recorder import SMALL


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_benchmark_of_traces_prints_a_row_for_each_layout_and_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--pairs", "2"]
    for setting in SMALL:
        arguments += ["--set", setting]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which this process caches
    rows = [line[12:].split() for line in printed_lines(capfd, "tracing", *arguments)[1:]]
    assert len(rows) == 3 and all(len(row) == 5 for row in rows)
    records = [int(row[1]) for row in rows]
    assert records[1] > records[2] > records[0] > 0  # tensor parallelism calls in every layer
    assert all(float(row[column]) > 0 for row in rows for column in (0, 2))
    assert not list(tmp_path.glob("tracing-*"))
