"""Rules on a row's cells: each must suit its column, and nodes, layout and batch must fit each other."""

from __future__ import annotations

import re
from typing import Iterator

from fugaku_gpt.report.column_titles import plain_title
from fugaku_gpt.report.facts import COUNTS, Context, Facts, is_size
from fugaku_gpt.report.figures import EMPTY, FAILED, TEXT, Figure, bytes_of, is_thousands, read_figure, seconds_of
from fugaku_gpt.report.findings import RowFinding
from fugaku_gpt.report.notes_table import NO_VALUE
from fugaku_gpt.report.rows import FROM_LOG

_SIZE_IN_NAME = re.compile(r"\d{1,4}(?:\.\d{1,3})?\s?[MBT]\b")
_TITLES = {
    "nodes": "Nodes", "size": "Size", "dp": "DP", "tp": "TP", "pp": "PP", "mbs": "MBS", "gbs": "GBS", "mem": "Mem",
    "seconds": "Sec/it", "tflops": "TFLOPs", "aggregate": "Est. Aggr. PetaFLOPs", "notes": "Notes",
    "layers": "Layers", "hidden": "Hidden size", "heads": "Heads", "recompute": "AC", "clock": "Clock",
}  # fmt: skip
_CAUSE = re.compile(
    r"oom|memory|hang|hung|stuck|time[ -]?out|timed|fail\w*\W+\w|kill|refus|reject|\blost\b|interrupt|unfinish|error|"
    r"exception|not run|cancel|crash|fault|abort|does ?n.t|can ?not|can't|because|\bdue\b|see |limit|not enough|too |"
    r"diverge|\bnan\b|unstable|skip|planned|pending|queue",
    re.IGNORECASE,
)
_NOT_STARTED = re.compile(r"refus|reject|\bfail|error|not run|does ?n.t divide", re.IGNORECASE)
_NOT_FINITE = re.compile(r"\s*[+-]?(?:nan|inf(?:inity)?)\s*", re.IGNORECASE)
_CAUSE_MARKS = ("^^", "†", "‡")
_FIGURE_IN_NOTES = re.compile(r"\d*\.\d+|\d+(?:\.\d+)?\s*[KMG]i?B|\d+[MB]")
_LEAST_GHZ, _MOST_GHZ = 0.5, 6.0


def title_of(column: str) -> str:
    """Title of a column as the notes write it."""
    return _TITLES.get(column, column)


def _fits_size(text: str, context: Context) -> bool:
    """True if a cell is a size, or the name of a model in a column that is not titled Size."""
    titles = [title for title, column in zip(context.table.titles, context.table.columns) if column == "size"]
    is_of_names = plain_title(titles[0]) == "model"
    is_name = _SIZE_IN_NAME.match(text) is not None or read_figure(text).kind == TEXT
    return is_size(text) or (is_of_names and is_name)


def check_kinds(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find cells that do not suit their column."""
    row, columns = facts.row, set(context.table.columns)
    if len(row.texts) > len(context.table.columns):
        problem = f"{len(row.texts)} cells under {len(context.table.columns)} columns"
        yield RowFinding(row.line, "cells", problem, "a bar too many, or one that is not written \\|")
    is_unknown = row.cell("notes").startswith(FROM_LOG) or f", {FROM_LOG}" in row.cell("notes")  # what no log says
    if "nodes" in columns and facts.nodes.nodes is None and not (is_unknown and row.cell("nodes") == NO_VALUE):
        yield _unfit_cell(facts, "nodes", "is no number of nodes")
    if "size" in columns and row.cell("size") not in ("", "-") and not _fits_size(row.cell("size"), context):
        yield _unfit_cell(facts, "size", "is no model size such as 124M")
    for column in COUNTS:
        figure = facts.figures[column]
        if column not in columns:
            continue
        if figure.kind == EMPTY:
            if _has_failed(facts) or is_unknown:
                continue
            yield RowFinding(row.line, "missing", f"{title_of(column)} is missing", "")
        elif figure.as_count is None and not (column == "gbs" and is_thousands(figure)):
            yield _unfit_cell(facts, column, "is no whole number")
    figure, title_unit = facts.figures["mem"], context.table.units.get("mem", "")
    if "mem" in columns and not _is_empty(figure) and bytes_of(figure, title_unit) is None:
        bare = figure.is_number and not figure.unit
        yield _unfit_cell(facts, "mem", "has no unit" if bare else "is no memory size", "unit" if bare else "cells")
    for column in ("seconds", "tflops", "aggregate"):
        if column in columns:
            yield from _check_number(facts, column, context)
    note = row.cell("notes")
    is_memory = bytes_of(read_figure(note)) is not None and "mem" not in columns  # a table that has no other place
    if _FIGURE_IN_NOTES.fullmatch(note) and not is_memory:
        yield _unfit_cell(facts, "notes", "is a figure, not a note")


def _check_number(facts: Facts, column: str, context: Context) -> Iterator[RowFinding]:
    figure = facts.figures[column]
    if _is_empty(figure):
        return
    if not figure.is_number:
        yield _unfit_cell(facts, column, "is no number")
    elif column == "seconds":
        if seconds_of(figure) is None:
            yield _unfit_cell(facts, column, "is no time")
        elif figure.unit and not figure.unit.lower().startswith("s") and _is_titled_seconds(context):
            yield _unfit_cell(facts, column, "is not in seconds", "unit")
    elif figure.unit and not re.match(r"[tp]?(era|eta)?f", figure.unit.lower()):
        yield _unfit_cell(facts, column, "is not in FLOP/s", "cells")
    is_zero_time = column == "seconds" and figure.is_number and figure.value == 0
    if is_zero_time or (figure.is_number and column != "aggregate" and figure.interval.high <= 0):
        yield _unfit_cell(facts, column, "is not above 0")


def _is_titled_seconds(context: Context) -> bool:
    """True if the title of the times promises seconds, as Sec/it does and Speed does not."""
    titles = dict(zip(reversed(context.table.columns), reversed(context.table.titles)))
    return "seconds" in titles and re.search(r"\bs(?:ecs?)?\b", titles["seconds"], re.IGNORECASE) is not None


def _has_failed(facts: Facts) -> bool:
    return any(facts.figures[name].kind == FAILED for name in ("mem", "seconds", "tflops"))


def _unfit_cell(facts: Facts, column: str, why: str, rule: str = "cells") -> RowFinding:
    return RowFinding(facts.row.line, rule, f"{title_of(column)} '{facts.row.cell(column)}' {why}")


def _has_measurements(facts: Facts) -> bool:
    return not all(_is_empty(facts.figures[name]) for name in ("seconds", "tflops"))


def _is_empty(figure: Figure) -> bool:
    return figure.kind in (EMPTY, FAILED)


def check_clock(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find a clock that is not in GHz."""
    if not facts.nodes.clock:
        return
    number, letter = facts.nodes.clock
    value = float(number)
    clock_text = f"clock '{number}{letter}Hz'"
    if letter.lower() != "g":
        meant = f"{number} GHz was meant" if _LEAST_GHZ <= value <= _MOST_GHZ else "the notes write GHz"
        yield RowFinding(facts.row.line, "unit", f"{clock_text} is not in GHz", meant)
    elif not _LEAST_GHZ <= value <= _MOST_GHZ:
        yield RowFinding(
            facts.row.line, "unit", f"{clock_text} is no clock of a processor", "MHz for GHz, or a lost point"
        )


def check_layout(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find ranks, shapes and batches that do not divide as they must, unless the row says that it was refused."""
    if not _has_measurements(facts) and _NOT_STARTED.search(facts.row.cell("notes")):
        return
    line, counts, nodes = facts.row.line, facts.counts, facts.nodes.nodes
    ranks, per_node = facts.ranks, facts.ranks_per_node
    listed = facts.figures["ranks"].as_count if "ranks" in context.table.columns else None
    available_ranks = listed or (nodes * per_node if nodes is not None and per_node else None)
    product = "DP {dp} * TP {tp} * PP {pp}".format(**counts) + f" = {ranks} ranks"
    if nodes == 0:
        yield RowFinding(line, "ranks", "0 nodes")
    elif ranks is not None and available_ranks is not None and ranks != available_ranks:
        unit = "GPUs per node" if context.on_gpus else "max-proc-per-node"
        have = f"{listed} ranks" if listed else f"{nodes} nodes * {unit} {per_node} = {available_ranks}"
        yield RowFinding(line, "ranks", f"{product}, but {have}", _ranks_cause(facts, ranks, available_ranks))
    yield from _check_splits(facts)
    batch, share = counts["gbs"], (counts["dp"] or 0) * (counts["mbs"] or 0)
    if batch and share and batch % share:
        fitting_batches = [str(value) for value in context.global_batches if value != batch and value % share == 0]
        cause = f"other rows have {fitting_batches[0]}" if fitting_batches else ""
        problem = f"GBS {batch} is not a multiple of DP {counts['dp']} * MBS {counts['mbs']} = {share}"
        yield RowFinding(line, "batch", problem, cause)


def _check_splits(facts: Facts) -> Iterator[RowFinding]:
    """Find more tensor-parallel ranks than heads can be shared among, and more stages than layers. Stages may hold
    different numbers of layers."""
    tp, pp = facts.counts["tp"] or 1, facts.counts["pp"] or 1
    if facts.heads and not any(heads % tp == 0 for heads in facts.heads):
        heads = " or ".join(sorted(map(str, facts.heads)))
        yield RowFinding(facts.row.line, "layout", f"TP {tp} does not divide the {heads} heads of {facts.size}")
    elif facts.shapes and not any(shape.hidden % tp == 0 for shape in facts.shapes):
        hidden = " or ".join(sorted({str(shape.hidden) for shape in facts.shapes}))
        yield RowFinding(facts.row.line, "layout", f"TP {tp} does not divide the hidden size {hidden} of {facts.size}")
    elif (
        facts.heads
        and facts.shapes
        and not any(shape.hidden % heads == 0 for shape in facts.shapes for heads in facts.heads)
    ):
        heads = " or ".join(sorted(map(str, facts.heads)))
        hidden = " or ".join(sorted({str(shape.hidden) for shape in facts.shapes}))
        problem = f"{heads} heads do not divide the hidden size {hidden} of {facts.size}"
        yield RowFinding(
            facts.row.line, "layout", problem, "another number of heads, unless they have a size of their own"
        )
    if facts.shapes and not any(shape.layers >= pp for shape in facts.shapes):
        layers = " or ".join(sorted({str(shape.layers) for shape in facts.shapes}))
        yield RowFinding(facts.row.line, "layout", f"PP {pp} is more than the {layers} layers of {facts.size}")


def is_uneven(facts: Facts) -> bool:
    """True if the stages of a row's pipeline hold different numbers of layers."""
    pp = facts.counts["pp"] or 1
    return bool(facts.shapes) and not any(shape.layers % pp == 0 for shape in facts.shapes)


def _ranks_cause(facts: Facts, ranks: int, available_ranks: int) -> str:
    nodes, per_node = facts.nodes.nodes or 0, facts.ranks_per_node or 1
    if nodes and ranks == nodes and per_node > 1:
        return "max-proc-per-node was 1"
    if nodes and ranks % nodes == 0 and ranks // nodes <= 48 and per_node == 1:
        return f"max-proc-per-node={ranks // nodes} is not written"
    if available_ranks % ranks == 0 or ranks % available_ranks == 0:
        return f"off by a factor of {max(ranks, available_ranks) // max(1, min(ranks, available_ranks))}"
    return ""


def check_failure(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find a row without figures that does not say why."""
    row = facts.row
    if _has_measurements(facts) or not {"seconds", "tflops"} & set(context.table.columns):
        return
    cause_texts = [row.cell(name) for name in ("nodes", "notes", "mem", "seconds", "tflops")]
    cause_texts = [text for text in cause_texts if not _NOT_FINITE.fullmatch(text)]  # which says nothing of the cause
    cause_texts += [text for text, column in zip(row.texts, context.table.columns) if not column]
    if any(_CAUSE.search(text) or any(mark in text for mark in _CAUSE_MARKS) for text in cause_texts):
        return
    yield RowFinding(
        row.line, "no-cause", "no figures, and no word of why", "say in Notes how it ended: OOM, timeout, hang, ..."
    )
