"""Keeps what the flight recorder records, for the time of a trace, in memory that is allocated before.

The recorder's own points are used: while a trace runs, two methods of its class are replaced by functions that also
copy what was just recorded. Before and afterwards the class is as it was, at no cost. (Methods of the one object would
do, but Python then keeps its attributes in another form for good, with which a phase and a call take 3.0 microseconds,
not 2.2, long after the trace.)
"""

from __future__ import annotations

import time
from typing import Callable, Optional

from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.records.trace import CALL_INT64S, PHASE_INT64S

_MARK_PHASE, _LEAVE = FlightRecorder.mark_phase, FlightRecorder.leave


class TraceBuffer:
    """The phases and calls of this rank during a trace, in memory for a certain number of each.

    A trace that finds its memory full ends at that moment: a gap in it would pass for computation.

    Attributes:
        started, ended: the trace's beginning and its end, in seconds since the epoch.
        is_cut: whether it ended because its memory was full.
    """

    def __init__(self, recorder: FlightRecorder, calls: int, phases: int) -> None:
        """``calls``, ``phases``: how many of each there is room for, beside the calls that are under way at the end."""
        self._recorder = recorder
        self._calls, self._phases = _touched_int64s(calls * CALL_INT64S), _touched_int64s(phases * PHASE_INT64S)
        self._calls_used = self._phases_used = 0
        self._outstanding = b""
        self.started = self.ended = 0.0
        self.is_cut = False

    def start(self) -> None:
        """Begin to keep what is recorded, of this recorder and in one trace at a time."""
        traced = self._recorder

        def mark_phase(
            recorder: FlightRecorder, phase: int, step: Optional[int] = None, micro_batch: Optional[int] = None
        ) -> None:
            _MARK_PHASE(recorder, phase, step, micro_batch)
            if recorder is traced:
                self._keep_phase()

        def leave(recorder: FlightRecorder, ordinal: int) -> None:
            if recorder is traced:
                self._leave(ordinal)
            else:
                _LEAVE(recorder, ordinal)

        self.started = time.time()
        _use_methods(mark_phase, leave)

    def stop(self) -> None:
        """End the trace, and keep the calls that are under way; without effect if it has ended."""
        if self.ended:
            return
        self.ended = time.time()
        _use_methods(_MARK_PHASE, _LEAVE)
        self._outstanding = b"".join(record.tobytes() for record in self._recorder.outstanding_records())

    @property
    def phases(self) -> bytes:
        """The records of phases (``records/trace.py``)."""
        return self._phases[: self._phases_used].tobytes()

    @property
    def calls(self) -> bytes:
        """The records of calls, those under way at the end last."""
        return self._calls[: self._calls_used].tobytes() + self._outstanding

    def _keep_phase(self) -> None:
        at = self._phases_used
        if at == len(self._phases):
            self._cut()
            return
        self._recorder.copy_progress(self._phases, at)
        self._phases_used = at + PHASE_INT64S

    def _leave(self, ordinal: int) -> None:
        recorder, at = self._recorder, self._calls_used
        position = recorder.record_at(ordinal)
        _LEAVE(recorder, ordinal)
        if position < 0:
            return
        recorder.copy_record(position, self._calls, at)
        self._calls_used = at + CALL_INT64S
        if self._calls_used == len(self._calls):  # at the end of a call, which is in the trace as the others are
            self._cut()

    def _cut(self) -> None:
        self.is_cut = True
        self.stop()


def _use_methods(mark_phase: Callable[..., None], leave: Callable[..., None]) -> None:
    """Have every recorder call these functions as its methods."""
    for name, method in (("mark_phase", mark_phase), ("leave", leave)):
        setattr(FlightRecorder, name, method)


def _touched_int64s(count: int) -> "memoryview[int]":
    """Memory whose pages exist: none is made while the trace runs."""
    return memoryview(bytearray(b"\1") * (8 * count)).cast("q")
