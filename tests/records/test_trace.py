"""Tests of the files of traces: what is written is read, and what is damaged is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.flight import CALL_FIELDS
from fugaku_gpt.records.trace import (
    PHASE_FIELDS,
    ClockReading,
    TraceHead,
    check_same_start,
    read_trace,
    remove_traces,
    trace_file,
    traced_ranks,
    write_trace,
)

HEAD = TraceHead(
    rank=1,
    ranks=2,
    dp=0,
    pp=1,
    tp=0,
    host="node-1",
    first=5,
    last=7,
    started=1000.0,
    ended=1010.0,
    is_cut=False,
    clock=(ClockReading(1000.0, 2.0, 1e-5), ClockReading(1010.0, 4.0, 1e-5)),
    names=("", "barrier"),
    communicators=("world",),
    phases=2,
    calls=1,
)


def write_example(directory: Path, head: TraceHead = HEAD) -> Path:
    """Writes a trace; returns its file."""
    phases, calls = np.zeros(2, PHASE_FIELDS), np.zeros(1, CALL_FIELDS)
    phases["time"], phases["phase"] = [1000.5, 1002.0], [1, 2]
    calls["operation"], calls["entered"] = 1, 1001.0
    write_trace(directory, head, phases.tobytes(), calls.tobytes())
    return trace_file(directory, head.rank)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_example(tmp_path)
    assert path == tmp_path / "000" / "rank-000001.trace" and traced_ranks(tmp_path) == [1]
    trace = read_trace(tmp_path, 1)
    assert trace.head == HEAD
    assert trace.phases["phase"].tolist() == [1, 2] and trace.calls["entered"].tolist() == [1001.0]
    assert trace.name(1) == "barrier" and trace.name(0) == trace.name(7) == "?"
    assert trace.communicator(0) == "world" and trace.communicator(3) == "?"
    remove_traces(tmp_path)
    assert traced_ranks(tmp_path) == []


def test_times_are_moved_to_rank_0_s_clock_with_its_drift(tmp_path: Path) -> None:
    write_example(tmp_path)
    moved = read_trace(tmp_path, 1).on_common_clock(np.array([1000.0, 1005.0, 1010.0]))
    assert moved.tolist() == [1002.0, 1008.0, 1014.0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:10], "does not begin as a trace does"),
        (lambda data: b"x" + data[1:], "does not begin as a trace does"),
        (lambda data: data[:40], "cut short"),
        (lambda data: data[:-1], "cut short, or has more than its head says"),
        (lambda data: data.replace(b'"version": 1', b'"version": 9'), "of version 9; this build reads 1"),
        (lambda data: data.replace(b'"rank": 1', b'"rank": 2'), "are none"),
        (lambda data: data.replace(b'"started": 1000.0', b'"started": -999.0'), "not a time"),
        (lambda data: data.replace(b'"host"', b'"hose"'), "host is missing"),
        (lambda data: data.replace(b'"first": 5', b'"first": "'), "damaged trace"),
        (lambda data: data.replace(np.float64(1002.0).tobytes(), np.float64("nan").tobytes()), "a time that is none"),
        (lambda data: data.replace(np.float64(1001.0).tobytes(), np.float64(-1.0).tobytes()), "a time that is none"),
    ],
)
def test_a_damaged_trace_file_is_refused_by_name(tmp_path: Path, change: object, reason: str) -> None:
    path = write_example(tmp_path)
    data = path.read_bytes()
    damaged = change(data)  # type: ignore[operator]
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(UsageError) as refused:
        read_trace(tmp_path, 1)
    assert str(path) in str(refused.value) and reason in str(refused.value)


def test_a_missing_trace_and_traces_of_two_starts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank-000000.trace: cannot be read: No such file"):
        read_trace(tmp_path, 0)
    check_same_start([HEAD, replace(HEAD, rank=0)])
    with pytest.raises(UsageError, match="of 2 ranks in iterations 5-7 and of 4 ranks in iterations 5-7"):
        check_same_start([HEAD, replace(HEAD, ranks=4)])
