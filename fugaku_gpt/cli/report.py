"""``fugaku-gpt report``: tables of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import click

from fugaku_gpt.cli.output import format_option, render_rows
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.report.collect import collect_rows
from fugaku_gpt.report.notes_table import COLUMNS, NO_VALUE, cells, grouped, notes_tables
from fugaku_gpt.report.rows import Row, raw_values

Rows = Tuple[List[Row], List[Row]]  # one for each configuration, one for each run
_TABLE_COLUMNS = (*COLUMNS[:-1], "Validation loss", COLUMNS[-1])


@click.group()
def report() -> None:
    """Tables of what runs have measured."""


@report.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@format_option
@click.option("--si", is_flag=True, help="Aggregate petaFLOP/s as TFLOPs * nodes / 1000; the notes divide by 1024.")
def table(directories: Tuple[Path, ...], form: str, si: bool) -> None:
    """Print the table of the runs in DIR: a run directory, or a folder of them such as a sweep's.

    md is the form of the notes; csv and json carry raw values with units, formulas and origin, and json every repeat.
    """
    print_table(collect_rows(directories), form, si)


def print_table(rows: Rows, form: str, si: bool = False) -> None:
    """Print rows to standard output in one of the four forms."""
    click.echo(render_table(rows, form, si), nl=False)


def write_tables(directories: Sequence[Path], out: Path) -> Rows:
    """Leave ``table.md``, ``table.csv`` and ``table.json`` of the runs in a folder; returns the rows."""
    rows = collect_rows(directories)
    for form in ("md", "csv", "json"):
        write_text_atomically(out / f"table.{form}", render_table(rows, form))
    return rows


def render_table(rows: Rows, form: str, si: bool = False) -> str:
    """Rows as text that ends in a newline."""
    merged, runs = rows
    if form == "md":
        return notes_tables(merged, si)
    if form == "table":
        return "\n".join(_terminal_table(heading, members, si) for heading, members in grouped(merged))
    values = [raw_values(row) for row in merged]
    if form == "csv":
        return render_rows(list(values[0]), values, "csv")
    singles = [raw_values(row) for row in runs]
    for row, value in zip(merged, values):
        value["repeats"] = [single for run, single in zip(runs, singles) if run.runs[0] in row.runs]
        value["runs"] = list(row.runs)
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _terminal_table(heading: str, rows: Sequence[Row], si: bool) -> str:
    """The notes' columns and the validation loss; the widest column comes last."""
    shown: List[Dict[str, Any]] = []
    for row in rows:
        *measured, notes = cells(row, si)
        losses = (row.first_validation_loss, row.last_validation_loss)
        loss = " to ".join(f"{value:.3f}" for value in losses if value is not None) or NO_VALUE
        shown.append(dict(zip(_TABLE_COLUMNS, (*measured, loss, notes))))
    return heading.lstrip("# ") + "\n" + render_rows(_TABLE_COLUMNS, shown, "table")
