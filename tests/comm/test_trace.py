"""Tests of the trace's buffer on a real flight recorder."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import numpy as np

from fugaku_gpt.comm import FlightRecorder
from fugaku_gpt.comm.trace import TraceBuffer
from fugaku_gpt.records.flight import BACKWARD, CALL_FIELDS, FORWARD, SLOTS, SUMS, read_flight
from fugaku_gpt.records.trace import PHASE_FIELDS

METHODS = (FlightRecorder.mark_phase, FlightRecorder.leave)


def recorder_of(directory: Path) -> Tuple[FlightRecorder, int]:
    """Returns a recorder, and the number of a communicator."""
    recorder = FlightRecorder(directory, 0, 2)
    return recorder, recorder.group("tp", (0, 1), 0)


def phases_of(buffer: TraceBuffer) -> List[Tuple[int, int, int]]:
    """Returns iteration, micro-batch and phase of each record of a phase."""
    records = np.frombuffer(buffer.phases, PHASE_FIELDS)
    return [(int(each["step"]), int(each["micro_batch"]), int(each["phase"])) for each in records]


def test_a_trace_has_the_recorder_s_own_records_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    recorder, tp = recorder_of(tmp_path)
    recorder.leave(recorder.enter(tp, "barrier", "-", (), True))  # before the trace
    buffer = TraceBuffer(recorder, 8, 8)
    buffer.start()
    recorder.mark_phase(FORWARD, 3, 0)
    blocking = recorder.enter(tp, "all_reduce_sum", "torch.float32", (4, 5), True)
    recorder.leave(blocking)
    recorder.mark_phase(BACKWARD, micro_batch=1)
    other, of_other = recorder_of(tmp_path / "other")  # is not traced, and records as ever
    other.mark_phase(SUMS)
    other.leave(other.enter(of_other, "barrier", "-", (), True))
    assert other.phase == SUMS and read_flight(other.path).calls[0].left > 0
    buffer.stop()
    assert (FlightRecorder.mark_phase, FlightRecorder.leave) == METHODS
    recorder.mark_phase(SUMS)  # after it
    recorder.leave(recorder.enter(tp, "barrier", "-", (), True))
    assert phases_of(buffer) == [(3, 0, FORWARD), (3, 1, BACKWARD)]
    (call,) = np.frombuffer(buffer.calls, CALL_FIELDS)
    recorded = read_flight(recorder.path).calls[1]
    assert (call["ordinal"], call["entered"], call["left"]) == (blocking, recorded.entered, recorded.left)
    assert recorder.names[call["operation"]] == "all_reduce_sum" and recorder.communicators[call["group"]] == "tp"
    assert buffer.started <= call["entered"] <= call["left"] <= buffer.ended and not buffer.is_cut


def test_a_call_that_outlives_the_ring_is_traced_when_it_ends_and_one_that_does_not_end_is_kept(tmp_path: Path) -> None:
    recorder, tp = recorder_of(tmp_path)
    buffer = TraceBuffer(recorder, 2 * SLOTS, 1)
    early, never = (recorder.enter(tp, "all_gather", "torch.float32", (number,), False) for number in (1, 2))
    buffer.start()
    for _ in range(SLOTS + 10):
        recorder.leave(recorder.enter(tp, "barrier", "-", (), True))
    recorder.wait(early)
    recorder.leave(early)
    unfinished = recorder.enter(tp, "all_gather", "torch.float32", (3,), False)
    buffer.stop()
    calls = np.frombuffer(buffer.calls, CALL_FIELDS)
    assert len(calls) == SLOTS + 10 + 3
    last = {int(call["ordinal"]): call for call in calls[-3:]}
    assert set(last) == {early, never, unfinished}
    assert last[early]["left"] >= last[early]["waited"] > 0 and last[early]["shape"].tolist() == [1, -1, -1, -1]
    assert last[never]["left"] == last[unfinished]["left"] == 0.0 and last[never]["shape"][0] == 2


def test_a_trace_ends_where_the_memory_is_full_and_the_recorder_continues(tmp_path: Path) -> None:
    for of_calls in (True, False):
        recorder, tp = recorder_of(tmp_path / str(of_calls))
        buffer = TraceBuffer(recorder, 2 if of_calls else 100, 100 if of_calls else 2)
        buffer.start()
        for micro_batch in range(5):
            recorder.mark_phase(FORWARD, 1, micro_batch)
            recorder.leave(recorder.enter(tp, "barrier", "-", (), True))
        assert buffer.is_cut and (FlightRecorder.mark_phase, FlightRecorder.leave) == METHODS
        ended = buffer.ended
        buffer.stop()
        assert buffer.ended == ended
        calls = np.frombuffer(buffer.calls, CALL_FIELDS)
        assert len(calls) == 2 == len(phases_of(buffer))
        # no call that the trace lacks began before its end: its wait would pass for computation
        assert all(call.entered >= ended for call in read_flight(recorder.path).calls[2:])
        assert (calls["left"] <= ended).all()
        assert [call.sequence for call in read_flight(recorder.path).calls] == [1, 2, 3, 4, 5]
