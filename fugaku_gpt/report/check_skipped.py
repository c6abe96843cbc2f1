"""Names the rules that a check leaves out because neither a row nor its heading says what they need."""

from __future__ import annotations

from typing import Iterator

from fugaku_gpt.report.facts import Context, Facts
from fugaku_gpt.report.markdown_tables import MarkdownTable


def unread_titles(table: MarkdownTable) -> Iterator[str]:
    """Yield the titles of the columns that no rule reads, which may hold what a rule needs."""
    for title, column in zip(table.titles, table.columns):
        if title and not column:
            yield title


def skipped_rules(facts: Facts, context: Context) -> Iterator[str]:
    """Yield "rule: what is not said" for each rule that cannot be applied to a row."""
    columns, counts = set(context.table.columns), facts.counts
    if (counts["tp"] or 1) > 1 and not facts.heads:
        yield "TP divides the heads: number of heads not said"
    counts_ranks = facts.ranks is not None and facts.nodes.nodes is not None and facts.figures["ranks"].as_count is None
    if context.on_gpus and counts_ranks and facts.ranks_per_node is None:
        yield "DP * TP * PP are all GPUs: GPUs per node not said"
    if facts.tflops is None or facts.seconds is None or not {"seconds", "tflops"} <= columns:
        return
    missing = [
        name
        for name, is_known in (
            ("layers and hidden size", bool(facts.shapes)),
            ("vocabulary", facts.has_vocabulary or not facts.shapes),
            ("sequence length", bool(facts.seq_len)),
            ("GBS", bool(counts["gbs"])),
            ("GPUs" if context.on_gpus else "nodes", bool(facts.units)),
        )
        if not is_known
    ]
    if missing:
        yield f"TFLOPs follow from Sec/it: {', '.join(missing)} not said"
