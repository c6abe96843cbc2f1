"""Rows of hand-written tables as numbers: the input of the rules of ``check``.

What neither the row nor the text above the table says stays unknown, and the rules that need it are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.report.catalogue import MACHINES, Machine
from fugaku_gpt.report.figures import Figure, Interval, bytes_of, is_thousands, read_figure, seconds_of
from fugaku_gpt.report.headings import GPUS, activation_checkpointing
from fugaku_gpt.report.markdown_tables import MarkdownRow, MarkdownTable
from fugaku_gpt.report.nodes_cell import NodesCell, read_clock, read_nodes_cell
from fugaku_gpt.report.row_models import models_of

COUNTS = ("dp", "tp", "pp", "mbs", "gbs")
_SIZE = re.compile(r"\d{1,4}(?:\.\d{1,3})?\s?[MBT]", re.IGNORECASE)
_MIN_MEANS = 2
_MEAN_DEVIATION = 0.005  # of the mean of two figures with two decimals
FIGURES = ("mem", "seconds", "tflops", "aggregate")
_YES = re.compile(r"y(?:es)?|true|on|1|\\?w/?|with|full|✓|✔", re.IGNORECASE)
_NO = re.compile(r"no?|false|off|0|w\s?[/\\]\s?o|without|none|✗|✘", re.IGNORECASE)


@dataclass(frozen=True)
class Context:
    """Facts that hold for all rows of a table.

    Attributes:
        machine: machine on which the table was measured.
        on_gpus: whether TFLOPs are per GPU, and a row need not say how many GPUs a node has.
        ranks_per_node: on GPUS, as stated or as most rows have it; None if unknown, or if each row states its own.
        global_batches: global batches of the table's rows, the most frequent first.
        has_mean_tflops: whether TFLOPs are partly means of two figures: 0.735 among figures of two decimals.
        si: whether aggregates are TFLOPs times nodes / 1000.
    """

    table: MarkdownTable
    machine: Machine
    on_gpus: bool = False
    ranks_per_node: Optional[int] = None
    global_batches: Tuple[int, ...] = ()
    has_mean_tflops: bool = False
    si: bool = False


@dataclass(frozen=True)
class Facts:
    """One row in numbers; None for a cell that is missing or cannot be read.

    Attributes:
        shapes: the models that the row may be of; empty if none is known.
        heads: numbers of heads that the row's model may have; empty if unknown.
        has_vocabulary: whether the vocabulary of the shapes is known.
        recompute: None if neither the row nor its heading says.
        units: number of nodes or GPUs, whichever TFLOPs are stated for.
        mem: memory in bytes.
        seconds: time of an iteration in seconds.
    """

    row: MarkdownRow
    nodes: NodesCell
    counts: Mapping[str, Optional[int]]
    figures: Mapping[str, Figure]
    size: str
    shapes: Tuple[ModelConfig, ...]
    heads: Tuple[int, ...]
    has_vocabulary: bool
    seq_len: Optional[int]
    recompute: Optional[bool]
    ranks_per_node: Optional[int]
    units: Optional[int]
    mem: Optional[Interval]
    seconds: Optional[Interval]
    tflops: Optional[Interval]
    aggregate: Optional[Interval]

    @property
    def ranks(self) -> Optional[int]:
        """DP * TP * PP, times CP where the table has such a column; None if one of them is not stated."""
        return _rank_product(self.row, self.counts, self.figures)


def is_size(text: str) -> bool:
    """True if a cell is a model size such as 124M."""
    return _SIZE.fullmatch(text) is not None


def contexts_of(tables: Sequence[MarkdownTable], machine: Optional[str], si: bool) -> List[Context]:
    """Collect the facts of each table of a text.

    A machine that is not given is the heading's; else Fugaku for a table in the form that is in use there, and unknown
    for any other. How many GPUs a node has is what most rows on that machine imply.
    """
    contexts = [_context_of(table, machine, si) for table in tables]
    implied: Dict[str, List[int]] = {}
    for context in contexts:
        if context.on_gpus and context.ranks_per_node is None:
            implied.setdefault(context.table.heading.machine, []).extend(_implied_ranks_per_node(context))
    return [
        replace(context, ranks_per_node=_most_frequent(implied.get(context.table.heading.machine, [])))
        if context.on_gpus and context.ranks_per_node is None
        else context
        for context in contexts
    ]


def _context_of(table: MarkdownTable, machine: Optional[str], si: bool) -> Context:
    name = machine or table.heading.machine
    is_fugaku_form = not table.on_gpus and _has_fugaku_form(table)
    name = name or ("a64fx" if is_fugaku_form else "other")
    on_gpus = name in GPUS or (name == "other" and not is_fugaku_form)
    context = Context(
        table, MACHINES[name], on_gpus, table.heading.ranks_per_node, has_mean_tflops=_has_means(table), si=si
    )
    batches = [facts_of(row, context).counts["gbs"] for row in table.rows]
    stated_batches = [batch for batch in batches if batch]
    return replace(
        context, global_batches=tuple(sorted(set(stated_batches), key=lambda batch: -stated_batches.count(batch)))
    )


def _has_means(table: MarkdownTable) -> bool:
    """True if TFLOPs have two decimals or fewer, but for several that end in a third, which is 5 in each of them."""
    figures = [figure for figure in (read_figure(row.cell("tflops")) for row in table.rows) if figure.is_number]
    finer = [figure for figure in figures if figure.decimals > 2]
    are_halves = all(figure.decimals == 3 and figure.text.endswith("5") for figure in finer)
    return _MIN_MEANS <= len(finer) < len(figures) and are_halves


def _has_fugaku_form(table: MarkdownTable) -> bool:
    """True if a table without a machine's name has what only the tables on Fugaku have: aggregates, a clock, toggles,
    memory in MiB, or a title that names the PyTorch build."""
    if {"aggregate", "clock"} & set(table.columns) or table.heading.torch:
        return True
    cells = (read_nodes_cell(row.cell("nodes")) for row in table.rows)
    has_toggles = any(cell.clock or cell.ranks_per_node or cell.tcmalloc or cell.states for cell in cells)
    return has_toggles or any("MiB" in row.cell("mem") for row in table.rows)


def _implied_ranks_per_node(context: Context) -> Iterable[int]:
    for row in context.table.rows:
        facts = facts_of(row, context)
        ranks, nodes = facts.ranks or facts.figures["ranks"].as_count, facts.nodes.nodes
        if ranks and nodes and ranks % nodes == 0:
            yield ranks // nodes


def facts_of(row: MarkdownRow, context: Context) -> Facts:
    """Convert one row to numbers."""
    heading, table = context.table.heading, context.table
    nodes = _nodes_of(row)
    figures = {
        column: read_figure(row.cell(column))
        for column in (*COUNTS, *FIGURES, "ranks", "cp", "seq_len", "layers", "hidden", "heads", "vocab")
    }
    counts = {column: figures[column].as_count for column in COUNTS}
    counts["gbs"] = counts["gbs"] or (heading.global_batch if "gbs" not in table.columns else None)
    counts["mbs"] = counts["mbs"] or (heading.micro_batch if "mbs" not in table.columns else None)
    size = _size_of(row.cell("size")) or heading.size
    models = models_of(size, heading, {name: figures[name].as_count for name in ("layers", "hidden", "heads", "vocab")})
    product = _rank_product(row, counts, figures)
    ranks_per_node, units = _units_of(nodes, figures["ranks"].as_count, product, context)
    return Facts(
        row,
        nodes,
        counts,
        figures,
        size,
        models.shapes,
        models.heads,
        models.has_vocabulary,
        _sequence_length(figures["seq_len"]) or heading.seq_len,
        _recompute_of(row, table),
        ranks_per_node,
        units,
        _positive(bytes_of(figures["mem"], table.units.get("mem", ""))),
        _positive(seconds_of(figures["seconds"], table.units.get("seconds", ""))),
        _positive(_tflops_of(figures["tflops"], context)),
        figures["aggregate"].interval if figures["aggregate"].is_number else None,
    )


def _size_of(text: str) -> str:
    """A size such as 1.3B, also where it is written in small letters."""
    return text.upper() if is_size(text) else text


def _sequence_length(figure: Figure) -> Optional[int]:
    """Tokens of a sequence, also where they are written as 2K."""
    return figure.as_count or (1024 * int(figure.value) if is_thousands(figure) else None)


def _tflops_of(figure: Figure, context: Context) -> Optional[Interval]:
    if not figure.is_number:
        return None
    if context.has_mean_tflops and figure.decimals == 3:
        return Interval(figure.value - _MEAN_DEVIATION, figure.value + _MEAN_DEVIATION)
    return figure.interval


def _rank_product(
    row: MarkdownRow, counts: Mapping[str, Optional[int]], figures: Mapping[str, Figure]
) -> Optional[int]:
    context_parallel = figures["cp"].as_count if "cp" in row.cells else 1
    factors = (counts["dp"], counts["tp"], counts["pp"], context_parallel)
    return reduce(mul, (factor or 0 for factor in factors)) or None


def _units_of(
    nodes: NodesCell, listed: Optional[int], product: Optional[int], context: Context
) -> Tuple[Optional[int], Optional[int]]:
    """Return (ranks per node, number of nodes or GPUs) of a row, which lists its ranks or has their product.

    A cell of the notes on Fugaku lists the toggles that differ from the default, which is one rank for each node.
    """
    if not context.on_gpus:
        return nodes.ranks_per_node or context.ranks_per_node or 1, nodes.nodes if nodes.nodes else None
    per_node = context.ranks_per_node
    counted = nodes.nodes * per_node if nodes.nodes and per_node else None
    return per_node, listed or counted or product


def _nodes_of(row: MarkdownRow) -> NodesCell:
    """The Nodes cell, completed by a clock in a column of its own."""
    nodes = read_nodes_cell(row.cell("nodes"))
    clock = read_clock(row.cell("clock"))
    return replace(nodes, clock=clock) if clock and not nodes.clock else nodes


def recompute_cell(row: MarkdownRow) -> Optional[bool]:
    """True for yes and False for no in a column of activation checkpointing; None for anything else."""
    cell = row.cell("recompute")
    if _YES.fullmatch(cell):
        return True
    return False if _NO.fullmatch(cell) else None


def _recompute_of(row: MarkdownRow, table: MarkdownTable) -> Optional[bool]:
    """Whether a row recomputes its activations, by its own column, its notes, or its heading."""
    in_column = recompute_cell(row)
    if in_column is not None:
        return in_column
    noted = activation_checkpointing(row.cell("notes"))
    return noted if noted is not None else table.heading.recompute


def _positive(interval: Optional[Interval]) -> Optional[Interval]:
    return interval if interval is not None and interval.high > 0 and interval.low >= 0 else None


def _most_frequent(values: Sequence[int]) -> Optional[int]:
    return max(set(values), key=values.count) if values else None
