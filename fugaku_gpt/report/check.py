"""Checks hand-written tables: finds rows that cannot be right, and the slip that most likely made them so.

Every row is checked by rules on its own cells and figures. Where it breaks rules, each single slip (two cells swapped,
cells shifted by one) is undone on trial: if the row then breaks no rule, that slip is reported instead. Then rows are
compared with each other: duplicates, and figures that do not follow the table's other rows.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Counter as Counts
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.jobs.schedulers.registry import is_job_id
from fugaku_gpt.limits import SLIP_ROWS
from fugaku_gpt.report.check_cells import (
    check_clock,
    check_failure,
    check_kinds,
    check_layout,
    is_uneven,
    title_of,
)
from fugaku_gpt.report.check_figures import (
    batch_of_heading,
    check_aggregate,
    check_machine,
    check_tflops,
    expected_tflops,
    is_slight,
    peak_of,
)
from fugaku_gpt.report.check_size import check_sizes
from fugaku_gpt.report.check_skipped import skipped_rules, unread_titles
from fugaku_gpt.report.facts import Context, Facts, contexts_of, facts_of, is_size, recompute_cell
from fugaku_gpt.report.figures import Figure, Interval
from fugaku_gpt.report.findings import RowFinding
from fugaku_gpt.report.markdown_tables import MarkdownRow, MarkdownTable, read_tables
from fugaku_gpt.report.nodes_cell import read_clock
from fugaku_gpt.report.notes_table import seconds_cell

_RULES = (check_kinds, check_clock, check_layout, check_machine, check_tflops, check_aggregate)
_MAX_CELLS = 40  # slips are not searched for in longer rows
_MIN_ALIKE = 3  # number of rows that must agree before another row counts as an outlier


@dataclass(frozen=True)
class Checked:
    """The outcome of a check.

    Attributes:
        rows: number of rows read.
        findings: ordered by line.
        skipped: "rule: what is not said" → number of rows to which the rule could not be applied.
        unread: title of a column that no rule reads → number of rows that have it.
    """

    rows: int
    findings: Tuple[RowFinding, ...]
    skipped: Mapping[str, int]
    unread: Mapping[str, int]


def check_text(text: str, machine: Optional[str] = None, si: bool = False) -> Tuple[int, List[RowFinding]]:
    """Return (number of rows read, findings ordered by line) of :func:`check_tables`."""
    checked = check_tables(text, machine, si)
    return checked.rows, list(checked.findings)


def check_tables(text: str, machine: Optional[str] = None, si: bool = False) -> Checked:
    """Check the tables of configurations in a Markdown text. Never raises.

    Args:
        machine: a key of ``catalogue.MACHINES``; by default the heading's machine, else that which the table's form
            suggests.
        si: whether the tables' aggregates are TFLOPs * nodes / 1000.
    """
    tables = read_tables(text)
    findings: List[RowFinding] = []
    skipped: Counts[str] = Counter()
    unread: Counts[str] = Counter()
    searches = iter(range(SLIP_ROWS.value))
    for context in contexts_of(tables, machine, si):
        diagnosed_rows = [(facts_of(row, context), _diagnose_row(row, context, searches)) for row in context.table.rows]
        findings += [finding for _, row_findings in diagnosed_rows for finding in row_findings]
        findings += _outliers(
            [facts for facts, row_findings in diagnosed_rows if not _is_broken(row_findings)], context
        )
        unslipped = [facts for facts, row_findings in diagnosed_rows if not _is_slipped(row_findings)]
        findings += check_sizes(unslipped, context)
        findings += _duplicates([facts for facts, _ in diagnosed_rows], context)
        skipped.update(rule for facts, _ in diagnosed_rows for rule in skipped_rules(facts, context))
        unread.update(title for title in unread_titles(context.table) for _ in context.table.rows)
    ordered = sorted(findings, key=lambda finding: (finding.line, finding.rule))
    return Checked(sum(len(table.rows) for table in tables), tuple(ordered), dict(skipped), dict(unread))


def _is_broken(findings: Sequence[RowFinding]) -> bool:
    return any(finding.rule != "no-cause" for finding in findings)


def _is_slipped(findings: Sequence[RowFinding]) -> bool:
    return any(finding.rule in ("swapped", "shifted", "cells") for finding in findings)


def _broken_rules(row: MarkdownRow, context: Context) -> List[RowFinding]:
    facts = facts_of(row, context)
    return [finding for rule in _RULES for finding in rule(facts, context)]


def _diagnose_row(row: MarkdownRow, context: Context, searches: Iterator[int]) -> List[RowFinding]:
    """Return the slip that explains everything wrong with a row, or else each rule that the row breaks.

    Args:
        searches: of which each search for slips, which takes as long as the rules of a hundred rows, takes an item.
    """
    facts = facts_of(row, context)
    findings = _broken_rules(row, context)
    swapped = _with_figures_swapped(facts, context)
    if swapped is not None and not _broken_rules(swapped, context):
        slip = f"Sec/it {row.cell('seconds')} and TFLOPs {row.cell('tflops')} are swapped"
        return [
            RowFinding(
                row.line, "swapped", slip, "; ".join(finding.what for finding in findings) or "by their decimals"
            )
        ]
    clocks = list(check_clock(facts, context))  # no slip of cells makes GHz into Hz
    signs = [finding for finding in findings if finding not in clocks]
    is_searched = signs and len(row.texts) <= _MAX_CELLS and not _needs_no_slip(facts, signs, context)
    if is_searched and next(searches, None) is not None:
        readable = _readable_cells(facts)
        for undone, slip, rule, blank in _with_slip_undone(row, context.table):
            if _breaks_no_rule(facts_of(undone, context), context, readable, (blank, *(f.what for f in clocks))):
                return [RowFinding(row.line, rule, slip, "; ".join(sign.what for sign in signs[:2])), *clocks]
    return findings + list(check_failure(facts, context))


def _needs_no_slip(facts: Facts, findings: Sequence[RowFinding], context: Context) -> bool:
    """True if no slip needs to be searched for: a toggle is not written, TFLOPs fit the batch that the text states, or
    they are only slightly off, which any change that affects the padding of the vocabulary would seem to mend."""
    is_tflops = all(finding.rule == "tflops" for finding in findings)
    is_explained = is_tflops and (is_slight(facts) or batch_of_heading(facts, context) is not None)
    return is_explained or any("max-proc-per-node" in finding.cause for finding in findings)


def _breaks_no_rule(facts: Facts, context: Context, readable: int, remaining: Sequence[str]) -> bool:
    """True if all findings on a row begin with one of ``remaining`` texts, such as the title of a cell that is lost,
    and at least ``readable`` of its cells are readable: a slip hides figures, and undoing it hides none. Stages of
    different sizes are possible, but no sign of a slip undone."""
    if _readable_cells(facts) < readable or is_uneven(facts):
        return False
    findings = (finding for rule in _RULES for finding in rule(facts, context))
    return all(finding.what.startswith(tuple(filter(None, remaining))) for finding in findings)


def _readable_cells(facts: Facts) -> int:
    """Count the cells whose content suits their column."""
    cell_values = (
        *(facts.nodes.nodes, *facts.counts.values(), facts.mem, facts.seconds, facts.tflops, facts.aggregate),
        *(facts.figures[name].as_count for name in ("ranks", "cp", "layers", "hidden", "heads", "seq_len", "vocab")),
        *(recompute_cell(facts.row), read_clock(facts.row.cell("clock")) or None),
    )
    return sum(value is not None for value in cell_values) + bool(is_size(facts.row.cell("size")))


def _with_figures_swapped(facts: Facts, context: Context) -> Optional[MarkdownRow]:
    """Return the row with Sec/it and TFLOPs exchanged if their decimals suggest it: their product is the same either
    way."""
    seconds, tflops = facts.figures["seconds"], facts.figures["tflops"]
    if context.on_gpus or not (seconds.is_number and tflops.is_number) or seconds.unit or tflops.unit:
        return None  # tables on GPUs write two decimals everywhere, or none

    def has_usual_decimals(time: Figure, speed: Figure) -> bool:
        return time.value > 0 and seconds_cell(time.value) == time.text and speed.decimals == 2

    if has_usual_decimals(seconds, tflops) or not has_usual_decimals(tflops, seconds):
        return None
    peak, _ = peak_of(facts, context)
    if peak is not None and seconds.interval.low > peak:
        return None
    return _with_cells_exchanged(
        facts.row, context.table, *(context.table.columns.index(name) for name in ("seconds", "tflops"))
    )


def _with_slip_undone(row: MarkdownRow, table: MarkdownTable) -> Iterator[Tuple[MarkdownRow, str, str, str]]:
    """Yield (the row with one slip undone, the slip, its rule, title of a column whose cell is lost), the likeliest
    first."""
    width = len(table.columns)
    titles = [title_of(column) if column else title for column, title in zip(table.columns, table.titles)]
    texts = list(row.texts) + [""] * (width - len(row.texts))
    for index in range(width):
        if texts[index] in ("", "-") or len(row.texts) > width:
            moved = [*texts[:index], *texts[index + 1 :], ""][:width]
            yield (
                _with_texts(row, table, moved),
                f"cells from {titles[index]} on are shifted by one to the right",
                "shifted",
                "",
            )
    if len(row.texts) < width or texts[-1] in ("", "-"):
        for index in range(width):
            for blank in ("", "-"):
                moved = [*texts[:index], blank, *texts[index:]][:width]
                slip = f"cells from {titles[index]} on are shifted by one to the left"
                yield _with_texts(row, table, moved), slip, "shifted", titles[index]
    turned = (
        ([*texts[1:], texts[0]], "all cells are shifted by one to the right"),
        ([texts[-1], *texts[:-1]], "all cells are shifted by one to the left"),
    )
    for moved, slip in turned:
        yield _with_texts(row, table, moved[:width]), slip, "shifted", ""
    for first, second in sorted(combinations(range(width), 2), key=lambda pair: pair[1] - pair[0]):
        if texts[first] != texts[second] and not {texts[first], texts[second]} & {"", "-"}:
            slip = f"{titles[first]} {texts[first]} and {titles[second]} {texts[second]} are swapped"
            yield _with_cells_exchanged(row, table, first, second), slip, "swapped", ""


def _with_cells_exchanged(row: MarkdownRow, table: MarkdownTable, first: int, second: int) -> MarkdownRow:
    texts = list(row.texts) + [""] * (len(table.columns) - len(row.texts))
    texts[first], texts[second] = texts[second], texts[first]
    return _with_texts(row, table, texts)


def _with_texts(row: MarkdownRow, table: MarkdownTable, texts: Sequence[str]) -> MarkdownRow:
    cells: Dict[str, str] = {}
    for column, text in zip(table.columns, texts):
        if column:
            cells.setdefault(column, text)
    return replace(row, texts=tuple(texts), cells=cells)


def _outliers(rows: Sequence[Facts], context: Context) -> Iterator[RowFinding]:
    """Find outliers where no formula applies: seconds * TFLOPs / sequences must be the same in all rows of a model."""
    products: Dict[Tuple[object, ...], List[Tuple[Facts, Interval]]] = {}
    for facts in rows:
        seconds, tflops, batch, units = facts.seconds, facts.tflops, facts.counts["gbs"], facts.units
        if expected_tflops(facts) or seconds is None or tflops is None or not batch or not units:
            continue
        factor = units / batch
        product = Interval(seconds.low * tflops.low * factor, seconds.high * tflops.high * factor)
        products.setdefault((facts.size, facts.seq_len), []).append((facts, product))
    for members in products.values():
        alike = [[other for _, other in members if other.overlaps(product)] for _, product in members]
        most = max(alike, key=len)
        if len(most) < max(_MIN_ALIKE, 0.6 * len(members)):
            continue
        for (facts, product), fellows in zip(members, alike):
            if len(fellows) < _MIN_ALIKE and len(fellows) < len(most) / 2:
                problem = (
                    f"Sec/it {facts.figures['seconds'].text} * TFLOPs {facts.figures['tflops'].text} is "
                    f"{product.middle / most[0].middle:.3g} times that of the table's other rows"
                )
                yield RowFinding(
                    facts.row.line, "tflops", problem, "another GBS or number of nodes than written, or a slip"
                )


_DATE = re.compile(r"\d{1,2}[-/]\d{1,2}(?:[-/]\d{2,4})?|\d{4}[-/]\d\d[-/]\d\d")
_COUNT = re.compile(r"n=\d+|attempt \d+|\d+ of \d+ did not end well|")


def _is_measurement_note(word: str) -> bool:
    """True if an item of the Notes only says when, by which job or how often a row was measured."""
    return any(pattern.fullmatch(word) is not None for pattern in (_DATE, _COUNT)) or is_job_id(word)


def _note_items(facts: Facts) -> List[str]:
    return [note.strip() for note in facts.row.cell("notes").split(", ")]


def _duplicates(rows: Sequence[Facts], context: Context) -> Iterator[RowFinding]:
    """Find rows whose configuration appears twice in one table. Another table may repeat rows to compare them, and a
    repeat that was measured on another day says so by its date."""
    first: Dict[Tuple[object, ...], Facts] = {}
    for facts in rows:
        row = facts.row
        setting_texts = [text for text, column in zip(row.texts, context.table.columns) if column not in _MEASURED]
        setting_notes = [note for note in _note_items(facts) if not _is_measurement_note(note)]
        configuration = tuple(re.sub(r"\s+", "", text.lower()) for text in setting_texts)
        figures = tuple(row.cell(name) for name in _MEASURED[:-1])
        same: Tuple[object, ...] = (configuration, figures)
        key: Tuple[object, ...] = (configuration, tuple(setting_notes))
        if all(not facts.figures[name].is_number for name in ("seconds", "tflops")):
            same = key = (*same, row.cell("notes"))  # two attempts that failed are two rows
        elif not facts.figures["mem"].is_number:
            same = (*same, tuple(setting_notes))  # a time alone can be the same by chance
        if same in first or key in first:
            other = first.get(same) or first[key]
            are_equal = figures == tuple(other.row.cell(name) for name in _MEASURED[:-1])
            if are_equal or not _differ_in_date(facts, other) or _are_turned(facts, other):
                yield _duplicate(facts, other, are_equal)
        first.setdefault(same, facts)
        first.setdefault(key, facts)


def _differ_in_date(facts: Facts, other: Facts) -> bool:
    dates, other_dates = ([note for note in _note_items(row) if _DATE.fullmatch(note)] for row in (facts, other))
    return bool(dates and other_dates and dates != other_dates)


def _are_turned(facts: Facts, other: Facts) -> bool:
    """True if Sec/it of one row is the TFLOPs of the other, and the other way round."""
    figures = (facts.row.cell("seconds"), facts.row.cell("tflops"))
    return all(figures) and figures == (other.row.cell("tflops"), other.row.cell("seconds"))


_MEASURED = ("mem", "seconds", "tflops", "aggregate", "notes")


def _duplicate(facts: Facts, other: Facts, equal: bool) -> RowFinding:
    line = other.row.line
    if equal:
        return RowFinding(facts.row.line, "duplicate", f"the same row as line {line}", "copied twice")
    if _are_turned(facts, other):
        figures = " and ".join(facts.row.cell(name) for name in ("seconds", "tflops"))
        cause = f"Sec/it and TFLOPs of one of them are swapped: {figures}"
    else:
        cause = "a setting differs that neither row says; or a repeat: one row of medians with n=2 is clearer"
    problem = f"the same configuration as line {line} with other figures"
    return RowFinding(facts.row.line, "duplicate", problem, cause)
