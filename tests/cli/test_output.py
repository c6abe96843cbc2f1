"""Rows in the four forms of every read verb."""

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


def test_markdown_keeps_a_bar_inside_its_cell() -> None:
    lines = render_rows(COLUMNS, [{"name": "a | b", "loss": 2}], "md").splitlines()
    assert lines == ["| name | loss | note |", "| --- | --- | --- |", "| a \\| b | 2 | - |"]


def test_csv_is_read_back_equal_with_empty_cells_for_what_is_missing() -> None:
    read = list(csv.reader(io.StringIO(render_rows(COLUMNS, ROWS, "csv"))))
    assert read == [list(COLUMNS), ["one", "1.5", ""], ['a, "b" | c', "0", "two\nlines"], ["", "", ""]]


def test_json_keeps_types_and_says_null() -> None:
    read = json.loads(render_rows(COLUMNS, ROWS, "json"))
    assert read[0] == {"name": "one", "loss": 1.5, "note": None} and list(read[0]) == list(COLUMNS)
    assert read[1]["loss"] == 0 and read[2] == {"name": "", "loss": None, "note": None}


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_ends_its_last_line_also_without_rows(form: str) -> None:
    for rows in ([], ROWS):
        text = render_rows(COLUMNS, rows, form)
        assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("form", ["table", "md"])
def test_a_cell_of_several_lines_stays_in_its_row(form: str) -> None:
    assert render_rows(COLUMNS, ROWS, form).count("\n") == 2 + len(ROWS)
