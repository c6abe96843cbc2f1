"""Rows → the Markdown tables that people keep by hand, byte for byte."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config.knobs import is_requested
from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.formulas.flops import aggregate_petaflops
from fugaku_gpt.records.run import FAILED, HUNG, INTERRUPTED, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT
from fugaku_gpt.report.rows import COLUMN_KNOBS, UNFINISHED, UNSAID, Row

COLUMNS = (
    "Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Est. Aggr. PetaFLOPs", "Notes",
)  # fmt: skip
NO_VALUE = "-"
_ALIGNMENT = "| ----: | ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | -------------------: | ----: |"
ENERGY_COLUMNS = ("W/node", "J/it", "J/token")  # on request, before the notes
_ENERGY_ALIGNMENT = "| -----: | ---: | ------: | ----: |"
_REASON_LENGTH = 80
_KNOBS = {knob.name: knob for knob in NODE_KNOBS}
STATUS_WORDS = {
    OUT_OF_MEMORY: "OOM",
    TIMEOUT: "timeout",
    REFUSED: "refused",
    FAILED: "failed",
    HUNG: "hang",
    INTERRUPTED: "interrupted",
    UNFINISHED: "unfinished",
}


def notes_tables(rows: Sequence[Row], si: bool = False, energy: bool = False) -> str:
    """One table, under its heading, for each model, sequence length, activation checkpointing and PyTorch build.

    Args:
        si: aggregate petaFLOP/s are TFLOPs * nodes / 1000, not / 1024.
        energy: with ``ENERGY_COLUMNS``, which the notes do not have.
    """
    tables: List[str] = []
    alignment = _ALIGNMENT[: _ALIGNMENT.rindex("| ----")] + _ENERGY_ALIGNMENT if energy else _ALIGNMENT
    for heading, members in grouped(rows):
        lines = [heading, "| " + " | ".join(columns(energy)) + " |", alignment]
        for row in members:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row, si, energy)) + " |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def grouped(rows: Sequence[Row]) -> List[Tuple[str, List[Row]]]:
    """Rows under their headings, in order of first appearance."""
    builds = {row.torch for row in rows if row.torch}
    only = builds.pop() if len(builds) == 1 else ""  # a row that never started joins the one build that the others ran
    groups: Dict[str, List[Row]] = {}
    for row in rows:
        groups.setdefault(_heading(row, row.torch or only), []).append(row)
    return list(groups.items())


def columns(energy: bool = False) -> Tuple[str, ...]:
    """The titles of a table."""
    return (*COLUMNS[:-1], *ENERGY_COLUMNS, COLUMNS[-1]) if energy else COLUMNS


def cells(row: Row, si: bool = False, energy: bool = False) -> List[str]:
    """The cells of one row, in the order of :func:`columns`."""
    known = row.tflops_notes is not None and row.nodes is not None
    aggregate = aggregate_petaflops(row.tflops_notes or 0.0, row.nodes or 0, si) if known else None
    memory = row.node_used_bytes
    return [
        nodes_cell(row),
        row.size,
        _whole(row.dp),
        _whole(row.tp),
        _whole(row.pp),
        _whole(row.micro_batch),
        _whole(row.global_batch),
        f"{memory / 2**20:.1f} MiB" if memory is not None else NO_VALUE,
        seconds_cell(row.seconds_per_iteration),
        f"{row.tflops_notes:.2f}" if row.tflops_notes is not None else NO_VALUE,
        f"{aggregate:.3f}" if aggregate is not None else NO_VALUE,
        *(_energy_cells(row) if energy else ()),
        notes_cell(row) or NO_VALUE,
    ]


def nodes_cell(row: Row) -> str:
    """The node count, then the applied toggles that differ from the default, in the notes' order."""
    toggles = [f"max-proc-per-node={row.ranks_per_node}"] if row.ranks_per_node != 1 else []
    applied = [(knob.name, getattr(row, knob.name)) for knob in COLUMN_KNOBS]
    for name, value in [*applied, *row.knobs]:
        if is_requested(value):
            text = toggle_words(name, value)
            toggles.append(text if _has_short_form(name) else f'"{text}"')
    return f"{_whole(row.nodes)} ({', '.join(toggles)})" if toggles else _whole(row.nodes)


def toggle_words(name: str, value: object) -> str:
    """A toggle as the tables write it: 2.2GHz, LD_PRELOAD=libtcmalloc.so, retention_state=0. A kept table may have
    knobs that this program does not have."""
    return _KNOBS[name].in_tables(value) if name in _KNOBS else f"{name}={value}"


def _has_short_form(name: str) -> bool:
    return name in _KNOBS and _KNOBS[name].short_form is not None


def seconds_cell(seconds: Optional[float]) -> str:
    """One decimal from 1 s up, three significant digits below."""
    if seconds is None:
        return NO_VALUE
    exponent = int(f"{seconds:.2e}".partition("e")[2])  # after rounding: 0.9996 is 1.0, not 1.000
    return f"{seconds:.1f}" if exponent >= 0 else f"{float(f'{seconds:.2e}'):.{2 - exponent}f}"


def notes_cell(row: Row) -> str:
    """Date, job, remarks, how it failed, and what was asked for and not applied."""
    parts = [row.date, row.job_id, *row.remarks]
    if row.status not in (OK, UNSAID):
        word = STATUS_WORDS.get(row.status, row.status)
        told = row.reason and (row.status in (REFUSED, FAILED) or row.status not in STATUS_WORDS)
        parts.append(f"{word}: {short_reason(row.reason)}" if told else word)
    if row.not_applied:
        parts.append("not applied: " + ", ".join(row.not_applied))
    return ", ".join(part for part in parts if part)


def short_reason(reason: str) -> str:
    """A reason that fits a cell: without the file it came from, one line, cut with an ellipsis."""
    text = re.sub(r"\s+", " ", re.sub(r"^(?:\S+:\d+|preset \S+:\d+|--set \S+): ", "", reason)).strip()
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1].rstrip() + "…"


def _energy_cells(row: Row) -> List[str]:
    """Four significant digits: more than the sampling of power is good for."""
    if row.watts_per_node is None:
        return [row.energy_words or NO_VALUE, NO_VALUE, NO_VALUE]
    return [
        f"{value:.4g}" if value is not None else NO_VALUE
        for value in (row.watts_per_node, row.joules_per_iteration, row.joules_per_token)
    ]


def _heading(row: Row, torch: str) -> str:
    parts = [f"{row.size} model", f"Sequence Length={row.seq_len if row.seq_len is not None else NO_VALUE}"]
    if row.recompute:
        parts.append("Activation Checkpointing")
    parts.append(f"PyTorch {torch or 'unknown'}")
    return "### " + ", ".join(parts)


def _whole(value: Optional[int]) -> str:
    return str(value) if value is not None else NO_VALUE
