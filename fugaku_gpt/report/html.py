"""Writes rows as one HTML file that opens anywhere: no network, no script, everything escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from fugaku_gpt.harmless import harmless
from fugaku_gpt.records.run import OK
from fugaku_gpt.report.notes_table import column_titles, columns_of, row_cells, rows_by_heading
from fugaku_gpt.report.rows import NO_STATUS, ResultRow, values_of_rows

TEMPLATE = Path(__file__).parent / "table.html.j2"


def html_tables(rows: Sequence[ResultRow], si: bool = False, energy: bool = False) -> str:
    """Write the notes' tables, and below each row where its figures come from.

    Args:
        si, energy: as for ``notes_tables``.
    """
    tables: List[Dict[str, Any]] = []
    columns = columns_of(rows, energy)
    for heading, members in rows_by_heading(rows):
        values = values_of_rows(members)
        shown = [
            {
                "cells": row_cells(row, columns, si),
                "ok": row.status in (OK, NO_STATUS),
                "origin": [(name, value) for name, value in origin.items() if value not in (None, "", False)],
            }
            for row, origin in zip(members, values)
        ]
        tables.append({"heading": heading.lstrip("# "), "rows": shown})
    return render_page(tables, column_titles(columns), _EXPLANATION.format(1000 if si else 1024))


_EXPLANATION = (
    "TFLOPs are per node, by the formula of the notes; the aggregate is TFLOPs × nodes / {}; Mem is what a whole node "
    "uses. A row in colour did not end well."
)


def render_page(tables: Sequence[Mapping[str, Any]], columns: Sequence[str], explanation: str) -> str:
    """Render tables as one page.

    Args:
        tables: each with its ``heading`` and ``rows``; a row has ``cells``, ``ok`` (else it is coloured) and
            ``origin``, (name, value) of what stands below it.
        explanation: the last paragraph.
    """
    from jinja2 import Environment, StrictUndefined  # here: no other form of a table needs it

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_shown)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(tables=tables, columns=columns, explanation=explanation) + "\n"


def _shown(value: Any) -> Any:
    """A value as a page shows it: autoescaping knows markup alone, and not what a browser obeys within a text."""
    return harmless(value if isinstance(value, str) else str(value))
