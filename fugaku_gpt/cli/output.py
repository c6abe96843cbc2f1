"""Rows as text in the four formats that every command which prints rows offers: table, md, csv, json."""

from __future__ import annotations

import csv
import io
import json
from typing import Any, Mapping, Sequence

import click

from fugaku_gpt.records.text import aligned, harmless


def render_rows(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], form: str) -> str:
    """Render rows in one of ``options.FORMATS``; the text ends in a newline.

    A missing or None value is ``-`` in tables, empty in CSV, null in JSON.
    """
    if form == "json":
        return json.dumps([{name: row.get(name) for name in columns} for row in rows], indent=2) + "\n"
    if form == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_csv_cell(row.get(name)) for name in columns] for row in rows)
        return buffer.getvalue()
    cells = [["-" if row.get(name) is None else _joined_lines(row[name]) for name in columns] for row in rows]
    if form == "md":
        lines = [
            list(columns),
            ["---"] * len(columns),
            *([cell.replace("|", "\\|") for cell in line] for line in cells),
        ]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return "".join(f"{line}\n" for line in aligned(columns, cells, has_rule=True))


def _csv_cell(value: Any) -> Any:
    """A value as a cell that a spreadsheet does not compute: a text that begins as a formula gets an apostrophe."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    text = harmless(value)
    return f"'{text}" if len(text) > 1 and text[0] in "=+-@\t" and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _joined_lines(value: Any) -> str:
    return harmless(" ".join(str(value).splitlines())).replace("\t", " ")


def echo(message: Any = "", nl: bool = True, err: bool = False) -> None:
    """Print a message through :func:`harmless`: every text of a command may hold what a job, a log or a file had.

    Args:
        nl: whether an end of line follows.
        err: whether it goes to standard error.
    """
    click.echo(harmless(str(message)), nl=nl, err=err)
