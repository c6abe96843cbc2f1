"""Spans of time in which ranks did something: read from the traces of a run (``records/trace.py``), or planned
(``report/planned_timeline.py``).

A row has two kinds of spans. Its *phases* follow each other without a gap, and *waits* lie within them: a rank that
waits for others does nothing else. Its *communications* last from the call that begins them to the moment at which
their end is seen; several are under way at once, and beside the phases: where a rank does not wait meanwhile, they
overlap with its computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCES, BROADCAST, GATHER_JSON, RECEIVE, REDUCE_SCATTER, SEND
from fugaku_gpt.records.flight import FORWARD as FORWARD_PHASE
from fugaku_gpt.records.flight import PHASES
from fugaku_gpt.records.text import spans as ranges_of
from fugaku_gpt.records.trace import RankTrace, check_same_start, read_trace, traced_ranks

FORWARD, BACKWARD, WEIGHTS, SUMS, OPTIMISER = "forward", "backward", "weight gradients", "sums", "optimiser"
LOG, VALIDATION, CHECKPOINT, BEGINNING, WAITING = "log", "validation", "checkpoint", "beginning", "waiting"
SUM, GATHER, MESSAGE_OUT, MESSAGE_IN, OTHER = "sum", "gather", "send", "receive", "other"
PHASE_KINDS = (BEGINNING, FORWARD, BACKWARD, WEIGHTS, SUMS, OPTIMISER, LOG, VALIDATION, CHECKPOINT, OTHER)
COMMUNICATION_KINDS = (SUM, GATHER, MESSAGE_OUT, MESSAGE_IN, OTHER)

_KIND_OF_OPERATION = {
    **dict.fromkeys((*ALL_REDUCES.values(), REDUCE_SCATTER), SUM),
    **dict.fromkeys((ALL_GATHER, GATHER_JSON, BROADCAST), GATHER),
    SEND: MESSAGE_OUT,
    RECEIVE: MESSAGE_IN,
}


class Span(NamedTuple):
    """A stretch of time.

    Attributes:
        kind: one of ``PHASE_KINDS``, ``COMMUNICATION_KINDS``, or ``WAITING``.
        start, end: in seconds since the beginning of the timeline.
        label: short text for a person.
        details: figures by name.
    """

    kind: str
    start: float
    end: float
    label: str
    details: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


@dataclass(frozen=True)
class Row:
    """One rank, or several that do the same.

    Attributes:
        name: text for a person.
        iterations: the iterations, one after the other; ``phases`` lie within them.
    """

    name: str
    iterations: Sequence[Span]
    phases: Sequence[Span]
    waits: Sequence[Span]
    communications: Sequence[Span]

    @property
    def end(self) -> float:
        """When its last phase ends, in seconds."""
        return self.phases[-1].end if self.phases else 0.0

    def seconds_by_kind(self) -> Dict[str, float]:
        """Seconds of each kind of phase without the waits within, and of waiting; they add up to the row's."""
        seconds = dict.fromkeys((*PHASE_KINDS, WAITING), 0.0)
        before = _WaitedBefore(self.waits)
        for phase in self.phases:
            waited = before(phase.end) - before(phase.start)
            seconds[phase.kind] += phase.seconds - waited
            seconds[WAITING] += waited
        return seconds

    def communication_seconds(self) -> Tuple[float, float]:
        """Seconds in which any communication was under way, and those of them in which the rank did not wait."""
        before, under_way, overlapped = _WaitedBefore(self.waits), 0.0, 0.0
        for start, end in _merged(self.communications):
            under_way += end - start
            overlapped += end - start - (before(end) - before(start))
        return under_way, overlapped


@dataclass(frozen=True)
class Timeline:
    """Rows over the same time.

    Attributes:
        title: text for a person.
        unit: what a second stands for where no time was measured; empty for seconds.
        notes: what a reader should know.
    """

    title: str
    rows: Sequence[Row]
    unit: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def end(self) -> float:
        """The end of its last row, in seconds."""
        return max((row.end for row in self.rows), default=0.0)


def timeline_of_run(directory: Path, ranks: Optional[Sequence[int]] = None) -> Timeline:
    """Read the traces of a run.

    Args:
        directory: folder of the traces.
        ranks: the ranks to read; default: all that have one.

    Raises:
        UsageError: there is no trace, or one is damaged or of another start of the run.
    """
    present = traced_ranks(directory)
    if not present:
        raise UsageError(
            f"{directory}: no traces: train with --set training.trace_iterations=5-7; they are written when these "
            "iterations are done"
        )
    missing = sorted(set(ranks or ()) - set(present))
    if missing:
        raise UsageError(f"{directory}: no trace of rank {ranges_of(missing)}; there are those of {ranges_of(present)}")
    traces = [read_trace(directory, rank) for rank in (ranks if ranks is not None else present)]
    heads = [trace.head for trace in traces]
    check_same_start(heads)
    origin = min(float(trace.on_common_clock(np.array([trace.head.started]))[0]) for trace in traces)
    head = heads[0]
    notes = []
    error = max(reading.error for each in heads for reading in each.clock)
    if error:
        notes.append(f"clocks of nodes were compared to within {error * 1e6:.0f} us")
    cut = [each.rank for each in heads if each.is_cut]
    if cut:
        notes.append(f"the memory for the trace was full before its end on rank {ranges_of(cut)}")
    if len(traces) < head.ranks:
        notes.append(f"{len(traces)} of {head.ranks} ranks")
    which = f"iterations {head.first}-{head.last}" if head.last > head.first else f"iteration {head.first}"
    return Timeline(which, [_row_of(trace, origin) for trace in traces], notes=tuple(notes))


def _row_of(trace: RankTrace, origin: float) -> Row:
    head = trace.head
    start, end = (float(time) for time in trace.on_common_clock(np.array([head.started, head.ended])) - origin)
    end = max(start, end)
    starts = np.maximum.accumulate(np.clip(trace.on_common_clock(trace.phases["time"]) - origin, start, end))
    bounds = np.append(starts, end)
    steps = trace.phases["step"]
    phases = [
        _phase(int(record["phase"]), int(record["micro_batch"]), float(bounds[index]), float(bounds[index + 1]))
        for index, record in enumerate(trace.phases)
    ]
    first = float(bounds[0])
    communications = list(_communications(trace, origin, first, float(bounds[-1])))
    waits = sorted((span for span in _waits(trace, origin, first, float(bounds[-1]))), key=lambda span: span.start)
    changes = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)] if len(steps) else []
    iterations = [
        Span("iteration", float(bounds[begin]), float(bounds[stop]), f"iteration {steps[begin]}", {})
        for begin, stop in zip(changes, changes[1:])
    ]
    coordinates = f"dp {head.dp} pp {head.pp} tp {head.tp}"
    return Row(f"rank {head.rank} ({coordinates}) {head.host}", iterations, phases, waits, communications)


def _phase(phase: int, micro_batch: int, start: float, end: float) -> Span:
    kind = PHASES[phase] if PHASES[phase] in PHASE_KINDS else OTHER
    if phase == FORWARD_PHASE and micro_batch < 0:
        kind = BEGINNING
    return Span(kind, start, end, kind if micro_batch < 0 else f"{kind} {micro_batch}", {})


def _communications(trace: RankTrace, origin: float, first: float, last: float) -> Iterator[Span]:
    """The calls of a rank, as far as they lie within the trace."""
    for record, entered, left in _times(trace, "entered", origin, first, last):
        operation = trace.name(int(record["operation"]))
        kind = _KIND_OF_OPERATION.get(operation, OTHER)
        yield Span(kind, entered, left, _call_label(trace, record), _call_details(trace, record))


def _waits(trace: RankTrace, origin: float, first: float, last: float) -> Iterator[Span]:
    """The stretches in which a rank did nothing but wait for a call to end; they do not overlap."""
    reached = first
    for record, waited, left in sorted(_times(trace, "waited", origin, first, last), key=lambda item: item[1]):
        start = max(waited, reached)
        if left <= start:
            continue
        reached = left
        yield Span(WAITING, start, left, f"wait: {_call_label(trace, record)}", _call_details(trace, record))


def _times(
    trace: RankTrace, column: str, origin: float, first: float, last: float
) -> Iterator[Tuple[Any, float, float]]:
    """The calls that have a time in a column, with this time and that of their end, cut to the trace."""
    calls = trace.calls[trace.calls[column] > 0.0]
    starts = np.clip(trace.on_common_clock(calls[column]) - origin, first, last)
    ends = np.where(calls["left"] > 0.0, trace.on_common_clock(calls["left"]) - origin, last)
    for record, start, end in zip(calls, starts.tolist(), np.clip(ends, first, last).tolist()):
        if end >= start:
            yield record, start, end


def _call_label(trace: RankTrace, record: Any) -> str:
    peer = int(record["peer"])
    where = f" {'to' if trace.name(int(record['operation'])) == SEND else 'from'} {peer}" if peer >= 0 else ""
    return f"{trace.name(int(record['operation']))} {trace.communicator(int(record['group']))}{where}"


def _call_details(trace: RankTrace, record: Any) -> Dict[str, Any]:
    details: Dict[str, Any] = {
        "shape": [size for size in record["shape"].tolist() if size >= 0],
        "type": trace.name(int(record["dtype"])),
        "number": int(record["sequence"]),
        "line": trace.name(int(record["site"])),
    }
    if int(record["micro_batch"]) >= 0:
        details["micro_batch"] = int(record["micro_batch"])
    return details


class _WaitedBefore:
    """How long a row has waited before a moment."""

    def __init__(self, waits: Sequence[Span]) -> None:
        """``waits``: by time, without overlap."""
        bounds: List[float] = []
        waited: List[float] = []
        total = 0.0
        for wait in waits:
            bounds += [wait.start, wait.end]
            waited += [total, total + wait.seconds]
            total += wait.seconds
        self._bounds, self._waited = np.array(bounds), np.array(waited)

    def __call__(self, moment: float) -> float:
        return float(np.interp(moment, self._bounds, self._waited)) if len(self._bounds) else 0.0


def _merged(communications: Sequence[Span]) -> Iterator[Tuple[float, float]]:
    """The stretches in which at least one of them is under way, in order."""
    start = end = None
    for span in sorted(communications, key=lambda span: span.start):
        if end is None or start is None:
            start, end = span.start, span.end
        elif span.start > end:
            yield start, end
            start, end = span.start, span.end
        else:
            end = max(end, span.end)
    if start is not None and end is not None:
        yield start, end
