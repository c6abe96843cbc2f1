"""Tests of trace events: they fit the format's schema, and spans of one thread lie within each other."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, DefaultDict, Dict, List, Tuple

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import TRACE_EVENTS
from fugaku_gpt.report import trace_events
from fugaku_gpt.report.timeline import COMMUNICATION_KINDS, WAITING, Row, Span, Timeline, timeline_of_run
from fugaku_gpt.report.trace_events import lanes, trace_document, write_trace_events
from tests.report.perfetto import slices_of
from tests.report.trace_event_schema import SCHEMA
from tests.report.traces import write_two_ranks


@pytest.fixture
def document(tmp_path: Path) -> Dict[str, Any]:
    write_two_ranks(tmp_path)
    return trace_document(timeline_of_run(tmp_path))


def test_events_fit_the_schema_which_refuses_others(document: Dict[str, Any]) -> None:
    jsonschema.validate(document, SCHEMA)
    event = next(event for event in document["traceEvents"] if event["ph"] == "X")
    for key, value in (("ts", -1.0), ("dur", "1"), ("ph", "Y"), ("pid", None), ("more", 1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "traceEvents": [{**event, key: value}]}, SCHEMA)


def check_nesting(events: List[Dict[str, Any]]) -> int:
    """Checks that spans of each thread lie within each other, as viewers see them; returns the number of threads.
    Ends are sums of floats in a viewer, and one that is a little late crosses the beginning of the next span."""
    threads: DefaultDict[Tuple[int, int], List[Tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    for spans in threads.values():
        open_ends: List[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    return len(threads)


def test_spans_of_a_thread_lie_within_each_other_and_not_across(document: Dict[str, Any]) -> None:
    assert check_nesting(document["traceEvents"]) > 4
    draws = random.Random(7)
    times = sorted(draws.uniform(0.0, 10.0) for _ in range(1000))
    phases = [Span("forward", start, end, "forward", {}) for start, end in zip(times, times[1:])]
    waits = [Span("waiting", (span.start + span.end) / 2, span.end, "wait", {}) for span in phases]
    iteration = Span("iteration", times[0], times[-1], "iteration", {})
    assert check_nesting(trace_document(Timeline("", [Row("", [iteration], phases, waits, [])]))["traceEvents"]) == 1


def test_ranks_are_processes_in_their_order_and_times_are_microseconds(document: Dict[str, Any]) -> None:
    events = document["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 (dp 0 pp 0 tp 0) node-0", "rank 1 (dp 0 pp 1 tp 0) node-1"]
    (wait,) = [event for event in events if event["name"] == "wait: receive pp from 1"]
    assert (wait["ts"], wait["dur"], wait["cat"]) == (pytest.approx(2e6, abs=5), pytest.approx(1e6, abs=5), "waiting")
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert threads == {"phases", "sum", "gather", "send", "receive"}
    assert document["otherData"]["notes"] == ["clocks of nodes were compared to within 2 us"]


def test_communications_at_once_get_as_many_threads_as_there_are_at_once() -> None:
    spans = [Span("sum", *times, "", {}) for times in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.0), (5.0, 6.0))]
    shared = lanes(spans[::-1])
    assert [[span.start for span in lane] for lane in shared] == [[0.0, 2.0, 5.0], [1.0], [2.5]]


def test_many_communications_at_once_share_no_thread() -> None:
    spans = [Span(kind, 0.0, 1.0, kind, {}) for kind in ("send", "receive") for _ in range(150)]
    events = trace_document(Timeline("", [Row("", [], [], [], spans)]))["traceEvents"]
    threads = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len(threads) == len(set(threads)) == 301


def test_files_are_written_alike_each_time_and_compressed_by_their_name(tmp_path: Path) -> None:
    write_two_ranks(tmp_path / "trace")
    timeline = timeline_of_run(tmp_path / "trace")
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write_trace_events(timeline, tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("a.json.gz", "b.json.gz"))
    assert first == second and gzip.decompress(first) == (tmp_path / "c.json").read_bytes()
    assert json.loads((tmp_path / "c.json").read_text()) == json.loads(json.dumps(trace_document(timeline)))
    with pytest.raises(UsageError, match=r"none/a.json: cannot be written: No such file or directory"):
        write_trace_events(timeline, tmp_path / "none" / "a.json")


def test_more_events_than_a_viewer_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "TRACE_EVENTS", TRACE_EVENTS._replace(value=2))
    spans = [Span("forward", 0.0, 1.0, "forward", {})] * 3
    with pytest.raises(UsageError, match="3 events of 1 rows: more than 2 events, .* with --ranks"):
        trace_document(Timeline("title", [Row("rank 0", [], spans, [], [])]))


# times in seconds, many of them within a microsecond of each other
moments = st.lists(st.integers(0, 40).map(lambda tick: tick * 0.3e-6) | st.floats(0.0, 1e4), min_size=2, max_size=20)


@st.composite
def rows(draw: Any) -> Row:
    """A row as ``timeline_of_run`` makes them: phases without gaps in iterations, waits within phases."""
    times = sorted(draw(moments))
    phases = [
        Span("forward", start, end, draw(st.text(min_size=1, max_size=3)), {}) for start, end in zip(times, times[1:])
    ]
    cuts = sorted({0, len(phases), *draw(st.lists(st.integers(0, len(phases)), max_size=4))})
    iterations = [Span("iteration", times[first], times[last], "iteration", {}) for first, last in zip(cuts, cuts[1:])]
    waits = []
    for phase in phases:
        inside = sorted(draw(st.lists(st.floats(phase.start, phase.end), max_size=4)))
        waits += [Span(WAITING, start, end, "wait", {}) for start, end in zip(inside[::2], inside[1::2])]
    calls = [
        Span(
            draw(st.sampled_from(COMMUNICATION_KINDS)),
            *sorted((draw(st.sampled_from(times)), end)),
            "sum",
            {"bytes": 8},
        )
        for end in draw(st.lists(st.sampled_from(times), max_size=6))
    ]
    return Row(draw(st.text()), iterations, phases, waits, calls)


@settings(max_examples=40)
@given(st.lists(rows(), min_size=1, max_size=3))
def test_perfetto_drops_no_event_of_any_timeline_and_names_every_thread(drawn: List[Row]) -> None:
    document = json.loads(json.dumps(trace_document(Timeline("title", drawn)), allow_nan=False))
    jsonschema.validate(document, SCHEMA)
    events = document["traceEvents"]
    slices = slices_of(events)
    spans = sum(len(row.iterations) + len(row.phases) + len(row.waits) + len(row.communications) for row in drawn)
    assert sum(map(len, slices.values())) == spans
    assert all(isinstance(event[name], int) for event in events if event["ph"] == "X" for name in ("ts", "dur"))
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(named) == len(set(named)) and set(slices) <= set(named)
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert processes == list(range(len(drawn))) == sorted({process for process, _ in named})


def test_the_model_of_perfetto_drops_crossing_and_negative_events(document: Dict[str, Any]) -> None:
    slices = slices_of(document["traceEvents"])
    assert {depth for *_, depth in slices[0, 1]} == {0, 1, 2}, "iterations, phases, waits"
    event = {"ph": "X", "pid": 0, "tid": 1, "name": "", "cat": ""}
    first, longer = {**event, "ts": 1, "dur": 4}, {**event, "ts": 1, "dur": 5}
    assert len(slices_of([longer, first])[0, 1]) == 2
    for wrong in ([first, longer], [first, {**event, "ts": 2, "dur": 4}], [{**event, "ts": 1, "dur": -1}]):
        with pytest.raises(ValueError):
            slices_of(wrong)
