"""Tests that hand-written tables and their cells are read as data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.report.figures import (
    EMPTY,
    FAILED,
    NUMBER,
    TEXT,
    Interval,
    bytes_of,
    read_figure,
    seconds_of,
    simplest_integer,
)
from fugaku_gpt.report.markdown_tables import read_tables, split_row
from fugaku_gpt.report.nodes_cell import read_nodes_cell
from fugaku_gpt.report.notes_table import notes_tables
from fugaku_gpt.report.rows import ResultRow
from tests.report.example_tables import rows
from tests.report.rows_of_tables import rows_from_tables
from tests.report.test_notes_table import EXPECTED

quick = settings(max_examples=60, deadline=None)
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "sweeps.md"


@pytest.mark.parametrize(
    ("text", "kind", "value", "unit", "marks"),
    [
        ("36.1", NUMBER, 36.1, "", ""),
        ("28827.7 MiB", NUMBER, 28827.7, "MiB", ""),
        ("16GB", NUMBER, 16, "GB", ""),
        ("1,024", NUMBER, 1024, "", ""),
        ("1.36^", NUMBER, 1.36, "", "^"),
        ("3.7 ^^", NUMBER, 3.7, "", "^^"),
        ("0.43 †", NUMBER, 0.43, "", "†"),
        ("1.2<sup>†</sup>", NUMBER, 1.2, "", "†"),
        ("**0.5**", NUMBER, 0.5, "", ""),
        ("-", EMPTY, 0, "", ""),
        ("", EMPTY, 0, "", ""),
        ("-^^", EMPTY, 0, "", "^^"),
        ("x", FAILED, 0, "", ""),
        ("OOM", FAILED, 0, "", ""),
        ("x (out of memory)", FAILED, 0, "", ""),
        ("02-15", TEXT, 0, "", ""),
        ("1e999", TEXT, 0, "", ""),
        ("four", TEXT, 0, "", ""),
    ],
)
def test_figures(text: str, kind: str, value: float, unit: str, marks: str) -> None:
    figure = read_figure(text)
    assert (figure.kind, figure.value, figure.unit, figure.marks) == (kind, value, unit, marks)


def test_a_figure_stands_for_all_that_round_to_it() -> None:
    assert read_figure("36.1").interval.low == pytest.approx(36.05)
    assert read_figure("36.1").interval.high == pytest.approx(36.15)
    assert read_figure("29").interval == Interval(28.5, 29.5)
    assert read_figure("0").interval == Interval(0.0, 0.5)
    assert read_figure("~30").interval == Interval(27.0, 33.0)


@quick
@given(st.floats(0.001, 1e6), st.integers(0, 6))
def test_the_interval_contains_the_unrounded_value(value: float, decimals: int) -> None:
    interval = read_figure(f"{value:.{decimals}f}").interval
    assert interval.overlaps(Interval(value, value))


def test_sizes_and_times_need_their_units() -> None:
    assert bytes_of(read_figure("1.0 GiB")) == Interval(0.95 * 2**30, 1.05 * 2**30)
    assert bytes_of(read_figure("8.0")) is None and bytes_of(read_figure("8 parsecs")) is None
    assert seconds_of(read_figure("8")) == Interval(7.5, 8.5)
    for text in ("2 msec", "2 ms", "2ms/it", "2000 us", "2000 µs"):
        written = seconds_of(read_figure(text))
        assert written is not None and written.middle == pytest.approx(0.002)
    for text in ("3 min", "3m", "0.05 h", "180 s", "180 sec/it", "180 s/iter"):
        written = seconds_of(read_figure(text))
        assert written is not None and written.middle == pytest.approx(180.0)
    milliseconds = seconds_of(read_figure("250 ms"))
    assert milliseconds is not None and milliseconds.middle == pytest.approx(0.25)
    assert seconds_of(read_figure("8 MiB")) is None


def test_the_simplest_integer_of_an_interval() -> None:
    assert simplest_integer(Interval(900, 1100), (960, 1024)) == 960
    assert simplest_integer(Interval(900, 1100), ()) == 1024
    assert simplest_integer(Interval(959.7, 960.4), ()) == 960
    assert simplest_integer(Interval(1200, 1500), ()) is None


def test_the_nodes_cell() -> None:
    cell = read_nodes_cell('1 (max-proc-per-node=4, 2.2GHz, LD_PRELOAD=libtcmalloc.so, "retention_state=0", spread)')
    assert (cell.nodes, cell.ranks_per_node, cell.freq_mhz, cell.tcmalloc) == (1, 4, 2200, True)
    assert cell.states == (("retention_state", 0),) and cell.other_toggles == ("spread",)
    assert read_nodes_cell("512").nodes == 512 and read_nodes_cell("many").nodes is None
    assert read_nodes_cell("512 (2.2Hz)").clock == ("2.2", "") and read_nodes_cell("512 (2.2Hz)").freq_mhz is None


def test_cells_are_split_at_bars_that_are_not_escaped() -> None:
    assert split_row("| a \\| b |  | c|") == ("a | b", "", "c")
    assert split_row("a | b") == ("a", "b")


TOLERATED = """\
Some words | with a bar.

## 1.3B model, Sequence Length = 2048, w/o Activation Checkpointing, PyTorch 1.7
Nodes | Size | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs
--- | --- | --- | --- | --- | --- | --- | --- | --- | ---
4 | 1.3B | 1 | 4 | 1 | 2 | 1024 | 10480.7 MiB | 3231.4 | 0.90
64 | 1.3B | 64 | 1
| | | |

| Name | Value |
| ---- | ----- |
| a    | b     |
```
| NNODES | TP | PP | DP | MBS | Speed | TFlops | Notes |
| 40 | 8 | 10 | 4 | 1 | 221.21s | x | OOM |
```
"""


def test_tables_of_many_forms_are_read() -> None:
    first, second = read_tables(TOLERATED)
    assert (first.line, first.heading.size, first.heading.seq_len, first.heading.torch) == (4, "1.3B", 2048, "1.7")
    assert first.heading.recompute is False and not first.on_gpus
    assert [row.line for row in first.rows] == [6, 7]
    assert first.rows[1].cell("tp") == "1" and first.rows[1].cell("gbs") == "" and first.rows[1].cell("notes") == ""
    assert second.on_gpus and second.line == 14 and second.rows[0].cell("seconds") == "221.21s"
    read = rows_from_tables([first])
    assert {row.iterations for row in read} == {0}  # a table does not say
    assert (read[0].nodes, read[0].tp, read[0].node_used_bytes) == (4, 4, pytest.approx(10480.7 * 2**20))
    assert read[1].global_batch is None and read[1].seconds_per_iteration is None


@pytest.mark.parametrize("text", [EXPECTED, GUIDE.read_text(encoding="utf-8")])
def test_canonical_tables_come_back_byte_for_byte(text: str) -> None:
    tables = read_tables(text)
    again = notes_tables(rows_from_tables(tables))
    assert again and again in text


ENDED = st.sampled_from(
    [("ok", ""), ("oom", ""), ("timeout", ""), ("unfinished", ""), ("failed", "exit code 1: a | b, c"), ("failed", "")]
    + [("refused", "layout.tp: 3: must divide"), ("interrupted", "")]
)


@pytest.mark.slow
@quick
@given(
    st.lists(rows(), min_size=1, max_size=4), ENDED, st.sampled_from([(), ("2.2GHz",), ("2.2GHz", "retention_state=0")])
)
def test_rows_written_and_read_are_written_the_same(
    written_rows: List[ResultRow], ended: "tuple[str, str]", missing: "tuple[str, ...]"
) -> None:
    first = replace(written_rows[0], status=ended[0], reason=ended[1], not_applied=missing)
    text = notes_tables([first, *written_rows[1:]])
    read = rows_from_tables(read_tables(text))
    assert notes_tables(read) == text
    by_line = {(row.size, row.nodes, row.dp, row.global_batch): row for row in read}
    back = by_line[(first.size, first.nodes, first.dp, first.global_batch)]
    if len(written_rows) == 1:
        assert (back.ranks_per_node, back.freq_mhz, back.tcmalloc) == (
            first.ranks_per_node,
            first.freq_mhz,
            first.tcmalloc,
        )
        assert (back.retention_state, back.knobs, back.remarks) == (first.retention_state, first.knobs, first.remarks)
        assert (back.date, back.job_id, back.not_applied) == (first.date, first.job_id, missing)
        assert back.status == ("" if ended[0] == "ok" else ended[0]) and back.reason == ended[1]
        assert close(back.seconds_per_iteration, first.seconds_per_iteration, 0.06)
        assert close(back.tflops_notes, first.tflops_notes, 0.006)


def close(a: Optional[float], b: Optional[float], error: float) -> bool:
    return a is not None and b is not None and abs(a - b) <= error


@quick
@given(st.text())
def test_any_text_is_read(text: str) -> None:
    rows_from_tables(read_tables(text))
    read_figure(text)
    read_nodes_cell(text)


def test_a_line_of_prose_with_a_bar_may_state_the_shape_of_the_model() -> None:
    row = "Nodes | DP | TP | PP | Sec/it\n--- | --- | --- | --- | ---\n4 | 4 | 1 | 1 | 2.0\n"
    (table,) = read_tables("# 1.3B\n\n--num-layers 24 | --hidden-size 2048\n\n" + row)
    assert any((model.layers, model.hidden) == (24, 2048) for model in table.heading.models)
