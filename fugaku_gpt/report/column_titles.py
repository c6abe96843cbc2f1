"""Which column of a table a title such as ``Step time (ms)`` means, and the unit that the title states."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Mapping, Sequence

_THROUGHPUT = "throughput"
# as written, without case, dots, blanks, dashes and what stands in parentheses → column
_COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(("procs", "processes", "worldsize"), "ranks"),
    **dict.fromkeys(("freq", "frequency", "clock"), "clock"),
    **dict.fromkeys(("size", "model", "modelsize", "msize", "params"), "size"),
    **dict.fromkeys(("dp", "dpsize"), "dp"),
    **dict.fromkeys(("tp", "mp", "tpsize"), "tp"),
    **dict.fromkeys(("pp", "ppsize"), "pp"),
    **dict.fromkeys(("cp", "cpsize"), "cp"),
    **dict.fromkeys(("mbs", "micbs", "microbs", "microbatch", "microbatchsize"), "mbs"),
    **dict.fromkeys(("gbs", "bs", "globbs", "globalbs", "globalbatch", "globalbatchsize", "batchsize"), "gbs"),
    **dict.fromkeys(("ac", "activationcheckpointing", "recompute"), "recompute"),
    **dict.fromkeys(("speed", "time"), "seconds"),
    "tf": "tflops",
    "validationloss": "validation",
    **dict.fromkeys(("notes", "note", "comments", "comment", "remarks"), "notes"),
    **dict.fromkeys(("seqlen", "sequencelength", "seq", "seqlength"), "seq_len"),
    **dict.fromkeys(("nheads", "heads", "nhead", "numattentionheads"), "heads"),
    **dict.fromkeys(("nlayers", "layers", "numlayers"), "layers"),
    **dict.fromkeys(("nhidden", "hidden", "hiddensize"), "hidden"),
    **dict.fromkeys(("vocab", "vocabsize", "vocablength"), "vocab"),
    **dict.fromkeys(("zero", "zerostage", "zs"), "zero"),
}
_UNIT = r"(?:gpu|npu|xpu|device|node|rank)"
_ITERATION = r"(?:iterations?|iters?|it|steps?)"
_PATTERNS: Mapping[str, "re.Pattern[str]"] = {
    "nodes": re.compile(r"(?:n|num)?nodes?"),
    "ranks": re.compile(r"(?:n|num)?(?:gpus|npus|devices|ranks)|(?:n|num)gpu"),
    "seconds": re.compile(
        rf"(?:ms|s|secs?|seconds|(?:elapsed)?time)/{_ITERATION}|(?:avg|mean|median)?{_ITERATION}time(?:/batch)?"
    ),
    "tflops": re.compile(rf"(?:model|achieved|est|avg|mean)?t(?:era)?flops?(?:/s(?:ec)?)?(?:/{_UNIT})?"),
    "aggregate": re.compile(r"(?:est)?(?:aggr(?:egate)?)?p(?:eta)?flops?(?:/s(?:ec)?)?"),
    "mem": re.compile(rf"(?:peak|max|used)?(?:gpu)?mem(?:ory)?(?:/{_UNIT})?|gpum"),
}
_IN_PARENTHESES = re.compile(r"[(\[]([^()\[\]]*)[)\]]")
_PER = re.compile(rf"per(?={_UNIT}$|{_ITERATION}$)")
_STATED_UNIT = re.compile(r"\s*(ms|msec|s|sec|seconds|[KMGT]i?B)(?:\s*/.*)?\s*", re.IGNORECASE)
# what stands in parentheses behind a column's title and makes it another column: Throughput (tokens/s), TFLOPs (total)
_OTHER_MEANINGS: Mapping[str, "re.Pattern[str]"] = {
    "seconds": re.compile(r"tok|sampl|seq|/\s*s(?:ec(?:onds?)?)?\b|\b(?:m|min|minutes|h|hours?|days?)\b|%"),
    "tflops": re.compile(r"total|aggr|all|sum|system|cluster|%"),
    "mem": re.compile(r"%"),
}


_SECONDS = re.compile(rf"(?:m?s|secs?|seconds)\s*(?:/|per)\s*{_ITERATION}")
_SECONDS_CELL = re.compile(r"~?\d[\d.,]*\s*(?:m?s|secs?|seconds)", re.IGNORECASE)


def column_with_cells(title: str, cells: Sequence[str]) -> str:
    """Name of the column that a title means; where the title alone does not tell, the cells below it decide.

    A throughput is a rate, which no rule reads, unless each of its cells states a time, such as ``26.1s``.
    """
    if plain_title(title) == _THROUGHPUT and not _IN_PARENTHESES.search(title):
        stated = [cell for cell in cells if any(map(str.isdecimal, cell))]
        return "seconds" if stated and all(map(_SECONDS_CELL.fullmatch, stated)) else ""
    return column_of(title)


@lru_cache(maxsize=1024)
def column_of(title: str) -> str:
    """Name of the column that a title means; empty for any other column."""
    plain = plain_title(title)
    if plain == _THROUGHPUT:
        return "seconds" if any(map(_SECONDS.fullmatch, _IN_PARENTHESES.findall(title.lower()))) else ""
    column = _COLUMNS.get(plain) or next((name for name, form in _PATTERNS.items() if form.fullmatch(plain)), "")
    comment = " ".join(_IN_PARENTHESES.findall(title.lower()))
    other = _OTHER_MEANINGS.get(column)
    return "" if other is not None and other.search(comment) else column


@lru_cache(maxsize=1024)
def plain_title(title: str) -> str:
    """A title in lower case, without blanks, dots, dashes, marks and what stands in parentheses; ``per`` is a slash."""
    return _PER.sub("/", re.sub(r"[\s.*_`#-]", "", _IN_PARENTHESES.sub("", title.lower())))


def unit_in_title(title: str) -> str:
    """The unit of time or memory that a title states, such as ms; empty if it states none."""
    if plain_title(title).startswith("ms/"):
        return "ms"
    matches = (_STATED_UNIT.fullmatch(text) for text in _IN_PARENTHESES.findall(title))
    return next((matched[1] for matched in matches if matched is not None), "")
