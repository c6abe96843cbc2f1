"""Reads hand-written Markdown tables: cells by column, with line numbers and the settings that headings state.

Reading is tolerant: of missing cells, escaped bars, no row of dashes, footnote marks, and code fences around tables.
Nothing is checked here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.limits import TABLE_LINE
from fugaku_gpt.report.column_titles import column_with_cells, plain_title, unit_in_title
from fugaku_gpt.report.headings import GPUS, Heading, HeadingReader

_ALIGNMENT = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_BAR = re.compile(r"(?<!\\)\|")
_MIN_COLUMNS = 4  # number of recognised columns that make a header without a row of dashes
_GPU_FORM = re.compile(r"nnodes|speed|.*gpus?")  # titles that only the notes on GPUs have


@dataclass(frozen=True)
class MarkdownRow:
    """One line of a table.

    Attributes:
        line: line number, from 1.
        texts: all cells as written, bars unescaped.
        cells: column → cell, for the recognised columns; a missing cell is empty.
    """

    line: int
    texts: Tuple[str, ...]
    cells: Mapping[str, str]

    def cell(self, column: str) -> str:
        """The cell of a column; empty if the table has none."""
        return self.cells.get(column, "")


@dataclass(frozen=True)
class MarkdownTable:
    """A table of configurations.

    Attributes:
        line: line number of the header, from 1.
        titles: titles of the columns, as written.
        columns: names of the recognised columns; empty for any other column.
        units: column → unit that its title states in parentheses, such as ms.
    """

    line: int
    heading: Heading
    titles: Tuple[str, ...]
    columns: Tuple[str, ...]
    rows: Tuple[MarkdownRow, ...]
    units: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        """True if the table is of a GPU machine by its heading or form: there, TFLOPs are per GPU."""
        if self.heading.machine:
            return self.heading.machine in GPUS
        named = (plain_title(title) for title, column in zip(self.titles, self.columns) if column)
        return any(_GPU_FORM.fullmatch(title) for title in named)


def read_tables(text: str) -> List[MarkdownTable]:
    """Find the tables of configurations in a Markdown text; other tables are skipped. Never raises."""
    lines = [line[: TABLE_LINE.value] for line in text.splitlines()]
    tables: List[MarkdownTable] = []
    reader, number = HeadingReader(), 0
    while number < len(lines):
        end = number + 1
        if lines[number].lstrip().startswith("#"):
            reader.add_title(lines[number])
        elif _BAR.search(lines[number]):
            while end < len(lines) and _BAR.search(lines[end]):
                end += 1
            table = _table(lines[number:end], number + 1, reader.heading)
            if table is not None:
                tables.append(table)
                reader.end_table()
            elif end == number + 1:  # no table at all, but a line of prose with a bar in it
                reader.add_line(lines[number])
        else:
            reader.add_line(lines[number])
        number = end
    return tables


def _table(lines: Sequence[str], first: int, heading: Heading) -> Optional[MarkdownTable]:
    titles = split_row(lines[0])
    below = [split_row(line) for line in lines[1:]]
    columns = tuple(
        column_with_cells(title, [texts[index] for texts in below if index < len(texts)])
        for index, title in enumerate(titles)
    )
    has_dashes = len(lines) > 1 and _ALIGNMENT.fullmatch(lines[1]) is not None
    recognised = [column for column in columns if column]
    measured = {"seconds", "tflops", "mem"} & set(recognised)
    is_plain_header = lines[0].lstrip().startswith("|") and len(recognised) >= max(_MIN_COLUMNS, 0.7 * len(columns))
    if not (has_dashes or is_plain_header) or not {"nodes", "ranks"} & set(recognised) or not measured:
        return None
    rows = []
    for number, (line, texts) in enumerate(zip(lines[1:], below), first + 1):
        if _ALIGNMENT.fullmatch(line):
            continue
        if not any(texts):
            continue
        cells: Dict[str, str] = {}
        for column, cell in zip(columns, texts):
            if column:
                cells.setdefault(column, cell)
        rows.append(MarkdownRow(number, texts, cells))
    units = {column: unit for column, unit in zip(columns, map(unit_in_title, titles)) if column and unit}
    return MarkdownTable(first, heading, titles, columns, tuple(rows), units)


def split_row(line: str) -> Tuple[str, ...]:
    """Split one line into cells, trimmed, with escaped bars unescaped."""
    text = line.strip()
    if text.startswith("|"):
        text = text[1:]
    cells = _BAR.split(text)
    if len(cells) > 1 and not cells[-1].strip():
        cells.pop()  # after the closing bar
    return tuple(cell.strip().replace("\\|", "|") for cell in cells)
