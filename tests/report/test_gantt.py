"""Tests of the picture of ranks over time: what it shows, for whom it is readable, and that it stays small."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.report.gantt import columns, gantt, write_gantt
from fugaku_gpt.report.timeline import BACKWARD, FORWARD, SUM, WAITING, Row, Span, Timeline, timeline_of_run
from tests.report.traces import write_two_ranks

SVG = "{http://www.w3.org/2000/svg}"


def span(kind: str, start: float, end: float) -> Span:
    """Returns a span."""
    return Span(kind, start, end, kind, {})


def widths_of(color: str, group: ElementTree.Element) -> List[int]:
    """Returns the widths of a color's pieces in a row of the picture."""
    paths = [path.get("d") or "" for path in group.iter(f"{SVG}path") if path.get("fill") == color]
    return [int(width) for path in paths for width in re.findall(r"M[\d.]+ [\d.]+h(\d+)v", path)]


def test_bars_have_the_shares_of_phases_waits_and_communications() -> None:
    row = Row(
        "rank 0",
        [span("iteration", 0.0, 10.0)],
        [span(FORWARD, 0.0, 4.0), span(BACKWARD, 4.0, 10.0)],
        [span(WAITING, 1.0, 2.0), span(WAITING, 9.0, 10.0)],
        [span(SUM, 3.0, 5.5)],
    )
    root = ElementTree.fromstring(gantt(Timeline("iteration 3", [row])))
    (group,) = root.findall(f"{SVG}g")
    assert widths_of("#0072b2", group) == [100, 200]
    assert widths_of("#e69f00", group) == [500]
    assert widths_of("#e8e8e8", group) == [100, 100]
    assert widths_of("#cc79a7", group) == [250]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "20.0%", "iteration 3", "time in s", "forward", "backward", "waiting", "sum"} <= set(texts)
    assert "optimiser" not in texts, "a kind that does not occur has no entry in the legend"


def test_a_column_shows_what_takes_most_of_it_and_nothing_where_little_happens() -> None:
    spans = [span(FORWARD, 0.0, 0.0006), span(BACKWARD, 0.0006, 0.001), span(FORWARD, 0.002, 0.0024)]
    assert columns(spans, [FORWARD, BACKWARD], 1.0) == [(FORWARD, 0, 1)]
    assert columns([span(BACKWARD, 0.25, 1.0)], [FORWARD, BACKWARD], 1.0) == [(BACKWARD, 250, 1000)]
    assert columns([], [FORWARD], 0.0) == []


def test_the_picture_has_a_title_and_a_description_for_those_who_do_not_see_it(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    root = ElementTree.fromstring(gantt(timeline_of_run(tmp_path)))
    assert root.get("role") == "img" and root.get("aria-labelledby") == "title description"
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and title.text == "iterations 4-5; clocks of nodes were compared to within 2 us"
    assert description is not None and description.text is not None
    assert description.text.startswith("2 rows over 11 s; each waits for 0% to 15% of its time.")


def test_text_from_outside_is_escaped() -> None:
    evil = "</text><script>alert(1)</script>&\x1b[31m"
    text = gantt(Timeline(evil, [Row(evil, [], [span(FORWARD, 0.0, 1.0)], [], [])]))
    assert "<script>" not in text and "\x1b" not in text
    assert [element.tag for element in ElementTree.fromstring(text).iter() if "script" in element.tag] == []


def test_the_size_does_not_depend_on_the_number_of_spans() -> None:
    sizes = []
    for count in (4_000, 16_000):
        phases = [
            span(FORWARD if n % 2 else BACKWARD, n / count, (n + 1) / count) for n in range(count)
        ]  # several in each column
        sizes.append(len(gantt(Timeline("many", [Row("rank 0", [], phases, [], [])]))))
    assert max(sizes) < 60_000


def test_too_many_rows_and_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    row = Row("rank", [], [span(FORWARD, 0.0, 1.0)], [], [])
    assert gantt(Timeline("512 rows", [row] * 512)).count("<g>") == 512
    with pytest.raises(UsageError, match="513 rows: more than 512 rows, .* with --ranks"):
        gantt(Timeline("too many", [row] * 513))
    with pytest.raises(UsageError, match=r"none/a.svg: cannot be written: No such file or directory"):
        write_gantt(Timeline("one", [row]), tmp_path / "none" / "a.svg")
