"""Writes pairs of measured rows and rows of reference as Markdown and HTML; byte-stable as all tables are."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from fugaku_gpt.harmless import markdown_cell
from fugaku_gpt.report.beside import ALIGNMENT, TITLES, Pair, cells_of, pairs_by_heading, values_of
from fugaku_gpt.report.html import render_page
from fugaku_gpt.report.notes_table import markdown_title

_EXPLANATION = (
    "Ref. columns are the reference's; a ratio is measured seconds per iteration over those of the reference. Spread: "
    "whether the reference is inside or outside of the repeats' times. TFLOPs are per node, counted as the reference "
    "counts them; Mem is what a whole node uses. An empty cell was not measured."
)


def beside_tables(pairs: Sequence[Pair]) -> str:
    """One Markdown table under its heading for each model, sequence length, activation checkpointing, PyTorch build and
    hardware of the references."""
    tables: List[str] = []
    for title, members in pairs_by_heading(pairs):
        lines = [markdown_title(title), "| " + " | ".join(TITLES) + " |", ALIGNMENT]
        lines += ["| " + " | ".join(map(markdown_cell, cells_of(pair))) + " |" for pair in members]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def beside_page(pairs: Sequence[Pair]) -> str:
    """The same tables as one page of HTML, with the raw values below each row."""
    tables: List[Dict[str, Any]] = []
    for title, members in pairs_by_heading(pairs):
        rows = [
            {
                "cells": cells_of(pair),
                "ok": not pair.is_outside,
                "origin": [(name, value) for name, value in values_of(pair).items() if value not in (None, "", False)],
            }
            for pair in members
        ]
        tables.append({"heading": title.lstrip("# "), "rows": rows})
    return render_page(tables, TITLES, f"{_EXPLANATION} A row in colour is outside of the spread.")
