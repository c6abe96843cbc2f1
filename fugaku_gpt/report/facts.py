"""Rows of hand-written tables as numbers: the input of the rules of ``check``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.report.catalogue import MACHINES, Machine, shapes_of
from fugaku_gpt.report.figures import Figure, Interval, bytes_of, read_figure, seconds_of
from fugaku_gpt.report.markdown_rows import NodesCell, read_nodes_cell
from fugaku_gpt.report.markdown_tables import MarkdownRow, MarkdownTable

COUNTS = ("dp", "tp", "pp", "mbs", "gbs")
FIGURES = ("mem", "seconds", "tflops", "aggregate")


@dataclass(frozen=True)
class Context:
    """Facts that hold for all rows of a table.

    Attributes:
        machine: machine on which the table was measured.
        ranks_per_node: on GPUs; None if each row states its own, or if it is unknown.
        global_batches: global batches of the table's rows, the most frequent first.
        si: whether aggregates are TFLOPs times nodes / 1000.
    """

    table: MarkdownTable
    machine: Machine
    ranks_per_node: Optional[int] = None
    global_batches: Tuple[int, ...] = ()
    si: bool = False


@dataclass(frozen=True)
class Facts:
    """One row in numbers; None for a cell that is missing or cannot be read.

    Attributes:
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
        """DP * TP * PP; None if one of them is not stated."""
        dp, tp, pp = self.counts["dp"], self.counts["tp"], self.counts["pp"]
        return dp * tp * pp if dp and tp and pp else None


def context_of(table: MarkdownTable, machine: Optional[str], si: bool) -> Context:
    """Collect the facts of a table; a machine that is not given is the heading's, Fugaku, or an unknown GPU."""
    name = machine or table.heading.machine or ("other" if table.on_gpus else "a64fx")
    context = Context(table, MACHINES[name], table.heading.ranks_per_node, (), si)
    facts = [facts_of(row, context) for row in table.rows]
    batches = [row_facts.counts["gbs"] for row_facts in facts]
    stated_batches = [batch for batch in batches if batch]
    if table.on_gpus and context.ranks_per_node is None:
        rank_counts = [
            row_facts.ranks // row_facts.nodes.nodes
            for row_facts in facts
            if row_facts.ranks and row_facts.nodes.nodes and row_facts.nodes.nodes > 0
        ]
        context = replace(context, ranks_per_node=_most_frequent(rank_counts))
    return replace(
        context, global_batches=tuple(sorted(set(stated_batches), key=lambda batch: -stated_batches.count(batch)))
    )


def facts_of(row: MarkdownRow, context: Context) -> Facts:
    """Convert one row to numbers."""
    heading, table = context.table.heading, context.table
    nodes = read_nodes_cell(row.cell("nodes"))
    figures = {column: read_figure(row.cell(column)) for column in (*COUNTS, *FIGURES, "ranks", "seq_len")}
    counts = {column: figures[column].as_count for column in COUNTS}
    counts["gbs"] = counts["gbs"] or (heading.global_batch if "gbs" not in table.columns else None)
    counts["mbs"] = counts["mbs"] or (heading.micro_batch if "mbs" not in table.columns else None)
    size = row.cell("size") or heading.size
    if table.on_gpus:
        ranks_per_node = context.ranks_per_node
        dp, tp, pp = (counts[name] for name in ("dp", "tp", "pp"))
        product = dp * tp * pp if dp and tp and pp else None
        counted = nodes.nodes * ranks_per_node if nodes.nodes and ranks_per_node else None
        units = figures["ranks"].as_count or counted or product
    else:
        ranks_per_node = nodes.ranks_per_node or context.ranks_per_node or 1
        units = nodes.nodes if nodes.nodes else None
    return Facts(
        row,
        nodes,
        counts,
        figures,
        size,
        _shapes(context, size),
        figures["seq_len"].as_count or heading.seq_len,
        heading.recompute if heading.recompute is not None else (None if table.on_gpus else False),
        ranks_per_node,
        units,
        _positive(bytes_of(figures["mem"])),
        _positive(seconds_of(figures["seconds"])),
        _positive(figures["tflops"].interval if figures["tflops"].is_number else None),
        figures["aggregate"].interval if figures["aggregate"].is_number else None,
    )


def _shapes(context: Context, size: str) -> Tuple[ModelConfig, ...]:
    heading = context.table.heading
    if heading.layers and heading.hidden:
        vocab = heading.vocab or 50257
        return (ModelConfig(layers=heading.layers, hidden=heading.hidden, heads=heading.heads or 1, vocab_size=vocab),)
    return shapes_of(size)


def _positive(interval: Optional[Interval]) -> Optional[Interval]:
    return interval if interval is not None and interval.high > 0 and interval.low >= 0 else None


def _most_frequent(values: Sequence[int]) -> Optional[int]:
    return max(set(values), key=values.count) if values else None
