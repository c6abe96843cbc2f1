"""Reads hand-written Markdown tables: cells by column, with line numbers and the settings that headings state.

Reading is tolerant: of missing cells, escaped bars, no row of dashes, footnote marks, and code fences around tables.
Nothing is checked here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

_ALIGNMENT = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_BAR = re.compile(r"(?<!\\)\|")
_MIN_COLUMNS = 4  # number of recognised columns that make a header without a row of dashes
_LONGEST_LINE = 20_000

# as written, without case, dots, blanks and what stands in parentheses → column
_COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(("nodes", "nnodes", "node", "#nodes"), "nodes"),
    **dict.fromkeys(("gpus", "ngpus", "ranks", "procs", "processes"), "ranks"),
    **dict.fromkeys(("size", "model", "modelsize", "params"), "size"),
    **dict.fromkeys(("dp", "dpsize"), "dp"),
    **dict.fromkeys(("tp", "mp", "tpsize"), "tp"),
    **dict.fromkeys(("pp", "ppsize"), "pp"),
    **dict.fromkeys(("mbs", "microbatch", "microbatchsize"), "mbs"),
    **dict.fromkeys(("gbs", "bs", "globalbatch", "globalbatchsize", "batchsize"), "gbs"),
    **dict.fromkeys(("mem", "memory", "gpumem", "mempergpu", "mem/gpu"), "mem"),
    **dict.fromkeys(("sec/it", "secs/it", "sec/iter", "s/it", "s/iter", "speed", "throughput", "time"), "seconds"),
    **dict.fromkeys(("tflops", "tflop/s", "tflops/gpu", "tflops/node", "tf"), "tflops"),
    **dict.fromkeys(
        ("estaggrpetaflops", "aggrpetaflops", "petaflops", "estpetaflops", "aggregatepetaflops", "pflops"), "aggregate"
    ),
    **dict.fromkeys(("notes", "note", "comments", "comment", "remarks"), "notes"),
    **dict.fromkeys(("seqlen", "sequencelength", "seq"), "seq_len"),
    **dict.fromkeys(("nheads", "heads", "nhead"), "heads"),
    **dict.fromkeys(("nlayers", "layers"), "layers"),
    **dict.fromkeys(("nhidden", "hidden", "hiddensize"), "hidden"),
    **dict.fromkeys(("zero", "zerostage"), "zero"),
}
_GPU_TITLES = ("nnodes", "gpus", "ngpus", "speed")


@dataclass(frozen=True)
class Heading:
    """Settings stated above a table; None or empty if not stated."""

    text: str = ""
    size: str = ""
    seq_len: Optional[int] = None
    recompute: Optional[bool] = None
    torch: str = ""
    layers: Optional[int] = None
    hidden: Optional[int] = None
    heads: Optional[int] = None
    vocab: Optional[int] = None
    global_batch: Optional[int] = None
    micro_batch: Optional[int] = None
    ranks_per_node: Optional[int] = None
    machine: str = ""


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
        on_gpus: whether the table has the form in use on GPU machines, where TFLOPs are per GPU.
    """

    line: int
    heading: Heading
    titles: Tuple[str, ...]
    columns: Tuple[str, ...]
    rows: Tuple[MarkdownRow, ...]

    @property
    def on_gpus(self) -> bool:
        """True if a row's TFLOPs are per GPU."""
        titles = {_plain(title) for title in self.titles}
        return self.heading.machine in GPUS or any(title in titles for title in _GPU_TITLES)


GPUS = ("v100", "a100", "h100")


def read_tables(text: str) -> List[MarkdownTable]:
    """Find the tables of configurations in a Markdown text; other tables are skipped. Never raises."""
    lines = [line[:_LONGEST_LINE] for line in text.splitlines()]
    tables: List[MarkdownTable] = []
    heading, title, number = Heading(), "", 0
    while number < len(lines):
        line = lines[number]
        if line.lstrip().startswith("#"):
            title = line.strip()
            heading = _heading(title)
        elif _BAR.search(line):
            end = number + 1
            while end < len(lines) and _BAR.search(lines[end]):
                end += 1
            table = _table(lines[number:end], number + 1, heading)
            if table is not None:
                tables.append(table)
            number = end
            continue
        elif line.strip() and not line.strip().startswith("```"):
            heading = _extended_heading(heading, line, is_heading=not title)
        number += 1
    return tables


def _table(lines: Sequence[str], first: int, heading: Heading) -> Optional[MarkdownTable]:
    titles = split_row(lines[0])
    columns = tuple(_COLUMNS.get(_plain(title), "") for title in titles)
    has_dashes = len(lines) > 1 and _ALIGNMENT.fullmatch(lines[1]) is not None
    recognised = [column for column in columns if column]
    measured = {"seconds", "tflops", "mem"} & set(recognised)
    is_plain_header = lines[0].lstrip().startswith("|") and len(recognised) >= max(_MIN_COLUMNS, 0.7 * len(columns))
    if not (has_dashes or is_plain_header) or not {"nodes", "ranks"} & set(recognised) or not measured:
        return None
    rows = []
    for number, line in enumerate(lines[1:], first + 1):
        if _ALIGNMENT.fullmatch(line):
            continue
        texts = split_row(line)
        if not any(texts):
            continue
        cells: Dict[str, str] = {}
        for column, cell in zip(columns, texts):
            if column:
                cells.setdefault(column, cell)
        rows.append(MarkdownRow(number, texts, cells))
    return MarkdownTable(first, heading, titles, columns, tuple(rows))


def split_row(line: str) -> Tuple[str, ...]:
    """Split one line into cells, trimmed, with escaped bars unescaped."""
    text = line.strip()
    if text.startswith("|"):
        text = text[1:]
    cells = _BAR.split(text)
    if len(cells) > 1 and not cells[-1].strip():
        cells.pop()  # after the closing bar
    return tuple(cell.strip().replace("\\|", "|") for cell in cells)


@lru_cache(maxsize=1024)
def _plain(title: str) -> str:
    return re.sub(r"\([^()]*\)|[\s.*_`]", "", title.lower())


_SIZE = re.compile(r"(?<![\w.=])(\d{1,4}(?:\.\d{1,3})?)\s?([MBT])\b(?!i?B)")
_SEQUENCE = re.compile(r"seq(?:uence)?[ _-]?len(?:gth)?\s*[=:]?\s*(\d{1,7})\b", re.IGNORECASE)
_RECOMPUTE = re.compile(
    r"(w/o|without|no)?\s*"
    r"(?:activation[ -]?(?:checkpoint(?:ing)?|recompute)|full recompute|checkpoint[-_ ]activations)",
    re.IGNORECASE,
)
_TORCH = re.compile(r"py ?torch\s*v?(\d{1,2}\.\d{1,3})", re.IGNORECASE)
_MACHINE = re.compile(r"\b(a64fx|fugaku|v100|a100|h100)\b", re.IGNORECASE)


def _setting(*names: str) -> "re.Pattern[str]":
    return re.compile(rf"\b(?:{'|'.join(names)})\s*[=:]\s*(\d{{1,9}})(k)?\b", re.IGNORECASE)


_SETTINGS = {
    "layers": _setting("nlayers", "num_layers", "layers"),
    "hidden": _setting("nhidden", "hidden_size", "hidden"),
    "heads": _setting("nheads", "num_attention_heads", "heads"),
    "vocab": _setting("vocab_size", "vocab", "padded_vocab_size"),
    "global_batch": _setting("gbs", "global_batch_size", "global batch"),
    "micro_batch": _setting("mbs", "micro_batch_size", "micro batch"),
    "ranks_per_node": _setting("gpus_per_node", "gpus per node", "max-proc-per-node"),
}


def _heading(text: str) -> Heading:
    return _extended_heading(Heading(text=text), text, is_heading=True)


def _extended_heading(heading: Heading, text: str, is_heading: bool) -> Heading:
    """Extend a heading by the settings of one more line; prose below it only adds what the heading leaves open."""
    settings: Dict[str, object] = {}
    size = _SIZE.search(text) if is_heading else None
    if size:
        settings["size"] = size[1] + size[2]
    for name, pattern in _SETTINGS.items():
        matched = pattern.search(text)
        if matched:
            value = int(matched[1]) * (1000 if matched[2] else 1)
            if value > 0:
                settings[name] = value
    sequence, torch, machine = _SEQUENCE.search(text), _TORCH.search(text), _MACHINE.search(text)
    if sequence and int(sequence[1]) > 0:
        settings["seq_len"] = int(sequence[1])
    recompute = _RECOMPUTE.search(text) if is_heading else None
    if recompute:
        settings["recompute"] = recompute[1] is None
    if torch and is_heading:
        settings["torch"] = torch[1]
    if machine:
        settings["machine"] = machine[1].lower().replace("fugaku", "a64fx")
    fresh = {name: value for name, value in settings.items() if is_heading or getattr(heading, name) in (None, "")}
    return replace(heading, **fresh)  # type: ignore[arg-type]  # names and types are those of the fields
