"""Converts Markdown tables back to rows: those by ``notes_tables`` round-trip byte for byte."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.formulas.flops import aggregate_petaflops
from fugaku_gpt.jobs.schedulers.registry import is_job_id
from fugaku_gpt.records.run import FAILED, REFUSED
from fugaku_gpt.report.figures import Interval, bytes_of, read_figure, seconds_of
from fugaku_gpt.report.markdown_tables import MarkdownRow, MarkdownTable
from fugaku_gpt.report.nodes_cell import read_nodes_cell
from fugaku_gpt.report.notes_table import NO_VALUE, STATUS_LABELS, notes_cell
from fugaku_gpt.report.rows import NO_STATUS, ResultRow

_DATE = re.compile(r"\d\d-\d\d")


def rows_from_tables(tables: Sequence[MarkdownTable]) -> List[ResultRow]:
    """Return one row for each line of the tables, in order; what a table does not state is None."""
    return [row_from_line(table, row) for table in tables for row in table.rows]


def row_from_line(table: MarkdownTable, line: MarkdownRow) -> ResultRow:
    """Convert one line of a table to a row."""
    nodes, heading = read_nodes_cell(line.cell("nodes")), table.heading
    states = dict(nodes.states)
    memory = bytes_of(read_figure(line.cell("mem")), table.units.get("mem", ""))
    seconds = seconds_of(read_figure(line.cell("seconds")), table.units.get("seconds", ""))
    validations = [
        read_figure(text).value for text in line.cell("validation").split(" to ") if read_figure(text).is_number
    ]
    row = ResultRow(
        size=line.cell("size") or heading.size or NO_VALUE,
        seq_len=_count_cell(line, "seq_len") or heading.seq_len,
        nodes=nodes.nodes,
        dp=_count_cell(line, "dp"),
        tp=_count_cell(line, "tp"),
        pp=_count_cell(line, "pp"),
        micro_batch=_count_cell(line, "mbs") or heading.micro_batch,
        global_batch=_count_cell(line, "gbs") or heading.global_batch,
        ranks_per_node=nodes.ranks_per_node or heading.ranks_per_node or 1,
        recompute=bool(heading.recompute),
        torch=heading.torch,
        freq_mhz=nodes.freq_mhz,
        tcmalloc=nodes.tcmalloc,
        retention_state=states.pop("retention_state", None),
        knobs=tuple(states.items()),
        node_used_bytes=memory.middle if memory is not None else None,
        seconds_per_iteration=seconds.middle if seconds is not None else None,
        tflops_notes=_tflops(line, nodes.nodes),
        first_validation_loss=validations[0] if validations else None,
        last_validation_loss=validations[-1] if validations else None,
        status=NO_STATUS,
    )
    return _with_notes(row, line.cell("notes"))


def _tflops(line: MarkdownRow, nodes: Optional[int]) -> Optional[float]:
    """TFLOPs as printed, refined by the further digits that the aggregate of many nodes implies."""
    printed, aggregate = read_figure(line.cell("tflops")), read_figure(line.cell("aggregate"))
    if not printed.is_number:
        return None
    if not aggregate.is_number or nodes is None:
        return printed.value

    def reproduces_cells(value: float) -> bool:
        petaflops = aggregate_petaflops(value, nodes)
        return (
            f"{value:.{printed.decimals}f}" == printed.text and f"{petaflops:.{aggregate.decimals}f}" == aggregate.text
        )

    finer = aggregate.interval.times(1024.0 / nodes)
    both = Interval(max(printed.interval.low, finer.low), min(printed.interval.high, finer.high))
    return next(
        (value for value in (printed.value, finer.middle, both.middle) if reproduces_cells(value)), printed.value
    )


def _count_cell(line: MarkdownRow, column: str) -> Optional[int]:
    return read_figure(line.cell(column)).as_count


def _with_notes(row: ResultRow, text: str) -> ResultRow:
    """Add the content of the Notes to a row: date, job, remarks, how it failed, and toggles that were not applied."""
    if text in ("", NO_VALUE):
        return row
    body, _, missing = text.rpartition("not applied: ")
    if body and not body.endswith(", ") or not missing or "not applied: " not in text:
        body, missing = text, ""
    notes = [note for note in body.rstrip(" ,").split(", ") if note]
    date = notes.pop(0) if notes and _DATE.fullmatch(notes[0]) else ""
    job = notes.pop(0) if notes and is_job_id(notes[0]) else ""
    remarks, status, reason = _status(notes)
    read = replace(
        row,
        date=date,
        job_id=job,
        remarks=remarks,
        status=status,
        reason=reason,
        not_applied=tuple(missing.split(", ")) if missing else (),
    )
    return read if notes_cell(read) == text else replace(row, remarks=(text,))


def _status(notes: List[str]) -> Tuple[Tuple[str, ...], str, str]:
    statuses: Dict[str, str] = {word: status for status, word in STATUS_LABELS.items()}
    for number, note in enumerate(notes):
        word, colon, reason = note.partition(": ")
        status = statuses.get(word)
        if status is None:
            continue
        if status in (REFUSED, FAILED) and colon:
            return tuple(notes[:number]), status, ", ".join([reason, *notes[number + 1 :]])
        if not colon and number == len(notes) - 1:
            return tuple(notes[:number]), status, ""
    return tuple(notes), NO_STATUS, ""
