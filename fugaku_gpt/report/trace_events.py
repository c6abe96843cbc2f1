"""Timelines in the trace-event format of Chromium, as JSON, which Perfetto and speedscope open.

Each row is a process: its first thread has iterations, phases and waits within each other; further threads have the
communications that are under way, each kind on as many threads as there are at once. Format: Google, "Trace Event
Format" (complete events "X", metadata "M"); times in whole microseconds.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import TRACE_EVENTS
from fugaku_gpt.records.files import write_bytes_atomically
from fugaku_gpt.report.timeline import COMMUNICATION_KINDS, Row, Span, Timeline

SUFFIXES = (".json", ".json.gz")
_MAIN = 1  # number of the thread that computes


def trace_document(timeline: Timeline) -> Dict[str, Any]:
    """A timeline as the object of the format.

    Raises:
        UsageError: it has too many events for a viewer.
    """
    rows = timeline.rows
    count = sum(len(row.iterations) + len(row.phases) + len(row.waits) + len(row.communications) for row in rows)
    if count > TRACE_EVENTS.value:
        raise UsageError(
            f"{count} events of {len(rows)} rows: more than {TRACE_EVENTS}, the limit of {TRACE_EVENTS.of}; choose "
            "some of the rows with --ranks"
        )
    events: List[Dict[str, Any]] = []
    for number, row in enumerate(rows):
        events += _row_events(number, row)
    other = {"title": timeline.title, "notes": list(timeline.notes)}
    if timeline.unit:
        other["unit"] = f"1 s stands for {timeline.unit}"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_trace_events(timeline: Timeline, path: Path) -> None:
    """Write a timeline to a file, compressed if its name ends in ``.gz``; the same timeline gives the same bytes.

    Raises:
        UsageError: it has too many events, or the file cannot be written.
    """
    text = json.dumps(trace_document(timeline), separators=(",", ":"), allow_nan=False).encode("ascii")
    try:
        write_bytes_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _row_events(process: int, row: Row) -> Iterator[Dict[str, Any]]:
    yield _name("process_name", process, _MAIN, row.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": _MAIN, "args": {"sort_index": process}}
    yield _name("thread_name", process, _MAIN, "phases")
    for span in (*row.iterations, *row.phases, *row.waits):
        yield _event(process, _MAIN, span)
    thread = _MAIN
    for kind in COMMUNICATION_KINDS:
        for lane, spans in enumerate(lanes([span for span in row.communications if span.kind == kind])):
            thread += 1
            yield _name("thread_name", process, thread, kind if lane == 0 else f"{kind} {lane + 1}")
            for span in spans:
                yield _event(process, thread, span)


def lanes(spans: Sequence[Span]) -> List[List[Span]]:
    """Spans shared out among as few lists as there are at once, so that those of each list do not overlap."""
    shared: List[List[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        free = next((lane for lane in shared if lane[-1].end <= span.start), None)
        if free is None:
            shared.append([span])
        else:
            free.append(span)
    return shared


def _event(process: int, thread: int, span: Span) -> Dict[str, Any]:
    # viewers add start and length: sums of whole numbers are exact, so that a span ends where the next one begins
    start, end = round(span.start * 1e6), round(span.end * 1e6)
    event = {
        "ph": "X",
        "name": span.label,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": end - start,
    }
    return {**event, "args": dict(span.details)} if span.details else event


def _name(metadata: str, process: int, thread: int, text: str) -> Dict[str, Any]:
    return {"ph": "M", "name": metadata, "pid": process, "tid": thread, "args": {"name": text}}
