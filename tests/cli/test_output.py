"""Tests of the four output formats of rows."""

from __future__ import annotations

import csv
import io
import json

import pytest

from fugaku_gpt.cli.options import FORMATS
from fugaku_gpt.cli.output import render_rows

COLUMNS = ("name", "loss", "note")
ROWS = [
    {"name": "one", "loss": 1.5, "note": None, "not shown": 9},
    {"name": 'a, "b" | c', "loss": 0, "note": "two\nlines"},
    {"name": ""},
]


def test_a_table_has_aligned_columns_and_no_trailing_blanks() -> None:
    assert render_rows(COLUMNS, ROWS[:1], "table") == "name  loss  note\n----  ----  ----\none   1.5   -\n"


def test_markdown_escapes_a_bar_inside_a_cell() -> None:
    lines = render_rows(COLUMNS, [{"name": "a | b", "loss": 2}], "md").splitlines()
    assert lines == ["| name | loss | note |", "| --- | --- | --- |", "| a \\| b | 2 | - |"]


def test_csv_round_trips_with_empty_cells_for_missing_values() -> None:
    parsed = list(csv.reader(io.StringIO(render_rows(COLUMNS, ROWS, "csv"))))
    assert parsed == [list(COLUMNS), ["one", "1.5", ""], ['a, "b" | c', "0", "two\nlines"], ["", "", ""]]


def test_json_keeps_types_and_has_null_for_missing_values() -> None:
    parsed = json.loads(render_rows(COLUMNS, ROWS, "json"))
    assert parsed[0] == {"name": "one", "loss": 1.5, "note": None} and list(parsed[0]) == list(COLUMNS)
    assert parsed[1]["loss"] == 0 and parsed[2] == {"name": "", "loss": None, "note": None}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_ends_with_a_single_newline_also_without_rows(form: str) -> None:
    for rows in ([], ROWS):
        text = render_rows(COLUMNS, rows, form)
        assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("form", ["table", "md"])
def test_a_cell_of_several_lines_is_printed_on_a_single_line(form: str) -> None:
    assert render_rows(COLUMNS, ROWS, form).count("\n") == 2 + len(ROWS)


HOSTILE = "\x1b]0;title\x07 \x9b2J \u202egnp.exe\ttab"


def test_text_of_other_programs_is_shown_and_not_obeyed() -> None:
    shown = "\\x1b]0;title\\x07 \\x9b2J \\u202egnp.exe tab"
    assert render_rows(["note"], [{"note": HOSTILE}], "table").splitlines()[2] == shown
    assert render_rows(["note"], [{"note": HOSTILE}], "md").splitlines()[2] == f"| {shown} |"
    assert render_rows(["note"], [{"note": HOSTILE}], "csv").splitlines()[1] == shown.replace(" tab", "\ttab")
    assert json.loads(render_rows(["note"], [{"note": HOSTILE}], "json")) == [{"note": HOSTILE}]


def test_a_spreadsheet_computes_no_text_of_a_csv() -> None:
    cells = ["=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "-2+3", "-0.5", "-1e-3", "-", "plain", "a=b"]
    parsed = [
        line[0] for line in csv.reader(io.StringIO(render_rows(["note"], [{"note": cell} for cell in cells], "csv")))
    ]
    assert parsed[1:] == ["'=1+1", "'+cmd|' /C calc'!A0", "'@SUM(A1)", "'-2+3", *cells[4:]]
