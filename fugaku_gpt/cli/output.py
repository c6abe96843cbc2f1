"""Rows as text in the four formats that every command which prints rows offers: table, md, csv, json."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from typing import Any, Iterable, Mapping, Sequence

import click

from fugaku_gpt.harmless import csv_cell, harmless, markdown_cell
from fugaku_gpt.records.text import aligned


def render_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], form: str) -> str:
    """Render rows in one of ``options.FORMATS``; the text ends in a newline.

    A missing or None value is ``-`` in tables, empty in CSV, null in JSON.
    """
    if form == "json":
        return json_document([{name: row.get(name) for name in columns} for row in rows])
    if form == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([csv_cell(row.get(name)) for name in columns] for row in rows)
        return buffer.getvalue()
    if form == "md":
        cells = [["-" if row.get(name) is None else markdown_cell(str(row[name])) for name in columns] for row in rows]
        lines = [list(columns), ["---"] * len(columns), *cells]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    cells = [["-" if row.get(name) is None else _joined_lines(row[name]) for name in columns] for row in rows]
    return "".join(f"{line}\n" for line in aligned(columns, cells, has_rule=True))


def json_document(value: Any) -> str:
    """A value as indented JSON of printable ASCII, which needs no escapes of a terminal's; the text ends in a newline.

    A number that is not finite, which JSON has none of, is null.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), indent=2, allow_nan=False, default=str)
    return text.replace("\x7f", "\\u007f") + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _joined_lines(value: Any) -> str:
    text = str(value)
    if text.isprintable():  # most are, in tables of millions of cells
        return text
    return harmless(" ".join(text.splitlines())).replace("\t", " ")


def echo(message: Any = "", nl: bool = True, err: bool = False) -> None:
    """Print a message through :func:`harmless`: every text of a command may hold what a job, a log or a file had.

    Args:
        nl: whether an end of line follows.
        err: whether it goes to standard error.
    """
    click.echo(harmless(str(message)), nl=nl, err=err)


def echo_at_once(line: str, err: bool = False) -> None:
    """Print a line by a call to the system, in one piece where that is a file or a pipe: a kill leaves no part of a
    line, and a thread that waits for the reader of a pipe holds no lock that the end of this process needs."""
    stream = sys.stderr if err else sys.stdout
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # it is no file of the system's, as within a test
        echo(line, err=err)
        return
    stream.flush()
    remaining = memoryview((harmless(line) + "\n").encode("utf-8"))
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def echo_script(text: str) -> None:
    """Print a script: to a terminal through :func:`harmless`; into a file or a pipe byte for byte, since escapes would
    change what it does."""
    if sys.stdout.isatty():
        echo(text, nl=False)
    else:
        click.echo(text.encode("utf-8", "surrogateescape"), nl=False)
