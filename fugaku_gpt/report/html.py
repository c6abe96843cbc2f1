"""Writes rows as one HTML file that opens anywhere: no network, no script, everything escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

from fugaku_gpt.harmless import harmless
from fugaku_gpt.records.run import OK
from fugaku_gpt.report.notes_table import column_titles, has_images, has_validation, row_cells, rows_by_heading
from fugaku_gpt.report.rows import NO_STATUS, ResultRow, raw_values

TEMPLATE = Path(__file__).parent / "table.html.j2"


def html_tables(rows: Sequence[ResultRow], si: bool = False, energy: bool = False) -> str:
    """Write the notes' tables, and below each row where its figures come from.

    Args:
        si, energy: as for ``notes_tables``.
    """
    from jinja2 import Environment, StrictUndefined  # here: no other form of a table needs it

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_shown)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    tables: List[Dict[str, Any]] = []
    validation, images = has_validation(rows), has_images(rows)
    for heading, members in rows_by_heading(rows):
        shown = [
            {
                "cells": row_cells(row, si, energy, validation, images),
                "ok": row.status in (OK, NO_STATUS),
                "origin": [(name, value) for name, value in raw_values(row).items() if value not in (None, "", False)],
            }
            for row in members
        ]
        tables.append({"heading": heading.lstrip("# "), "rows": shown})
    return template.render(tables=tables, columns=column_titles(energy, validation, images), si=si) + "\n"


def _shown(value: Any) -> Any:
    """A value as a page shows it: autoescaping knows markup alone, and not what a browser obeys within a text."""
    return harmless(value if isinstance(value, str) else str(value))
