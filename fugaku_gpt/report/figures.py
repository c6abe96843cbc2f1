"""Cells of hand-written tables as figures: a number with unit and footnote marks, and the interval left by rounding.

``36.1`` stands for every value from 36.05 to 36.15. All checks of tables compute with such intervals, so that a row is
reported only if no values behind its printed figures can fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional, Tuple

_NONE = ("", "-", "--", "---", "–", "—", "−", "n/a", "na", "?", "tbd", "none")
_FAILED = re.compile(
    r"(?:x|✗|✘|❌|oom|out of memory|fail(?:ed|ure)?|hang|hung|stuck|time(?:out|d out)|killed|lost|refused|rejected"
    r"|error|nan|inf)\b.*"
    r"|[✗✘❌]|x+",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?P<about>[~≈])?\s*(?P<number>[+-]?(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,12})?|\.\d{1,12})(?P<exponent>[eE][-+]?\d{1,2})?"
    r"(?:\s*(?:±|\+/?-)\s*(?P<spread>\d{1,18}(?:\.\d{1,12})?)|\s*(?:-|–|to)\s*(?P<last>\d{1,18}\.\d{1,12}))?"
    r"\s*(?P<unit>[A-Za-z%µ][A-Za-z%µ/. -]{0,15})?\s*(?P<marks>[\^†‡*?/]*)\s*(?P<comment>\([^()]{0,200}\))?"
)
_UNIT_ALONE = re.compile(r"[-–—−]?\s*(?:[KMGT]i?B|ms)", re.IGNORECASE)  # a unit whose number nobody filled in
_MARKS = re.compile(r"</?(?:sup|sub|b|i|em|strong|u|small)>|~~|\\(?=[\^*_~])|[`]|\*\*", re.IGNORECASE)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_FOOTNOTE = re.compile(r"\[\^[^\]\s]{1,32}\]|\[\d{1,2}\]|[¹²³⁴-⁹§¶]")  # of Markdown, numbered, superscript
_LINK = re.compile(r"\[([^\[\]^]{1,64})\]\([^()\s]{0,400}\)")
_ENCLOSED = re.compile(r"\(([^()]+)\)|\*([^*]+)\*|_([^_]+)_|\$([^$]+)\$")  # the whole cell

_BOUND_MARKS = (">", "≥")
NUMBER = "number"
EMPTY = "none"  # a dash, or nothing
FAILED = "failed"  # x, OOM and similar
TEXT = "other"  # a text

_OWNER = re.compile(r"\s*/\s*(?:gpu|node|device|rank|npu)s?$")
_BYTES = {
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
    "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40,
}  # fmt: skip
_SECONDS = {
    "s": 1.0, "s/it": 1.0, "sec": 1.0, "secs": 1.0, "sec/it": 1.0, "seconds": 1.0, "s/iter": 1.0,
    "ms": 1e-3, "msec": 1e-3, "ms/it": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "m": 60.0, "h": 3600.0,
}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """All values from ``low`` to ``high``."""

    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """True if some value is in both, with a tolerance of 1e-9 because decimal figures are inexact in binary."""
        slack = 1e-9 * max(abs(self.low), abs(self.high), abs(other.low), abs(other.high))
        return self.low <= other.high + slack and other.low <= self.high + slack

    def times(self, factor: float) -> "Interval":
        """The interval scaled by a positive factor."""
        return Interval(self.low * factor, self.high * factor)

    def divided_by(self, other: "Interval") -> "Interval":
        """The interval of all quotients with an interval of positive values."""
        return Interval(self.low / other.high, self.high / other.low if other.low > 0 else float("inf"))

    @property
    def middle(self) -> float:
        """The value halfway between both ends."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Figure:
    """The content of one cell.

    Attributes:
        kind: ``NUMBER``, ``EMPTY``, ``FAILED`` or ``TEXT``.
        text: the cell as written, without footnote marks.
        value: the number; 0 if there is none.
        decimals: number of digits printed after the point.
        unit: the unit as written; empty if there is none.
        marks: footnote marks: ``^`` estimated, ``^^`` stuck after the first iteration, ``†`` see comment, ``?`` unsure.
        comment: words in parentheses after the number, such as (OOM after the first iteration).
    """

    kind: str
    text: str
    value: float = 0.0
    decimals: int = 0
    unit: str = ""
    marks: str = ""
    interval: Interval = Interval(0.0, 0.0)
    comment: str = ""

    @property
    def is_number(self) -> bool:
        """True if the cell is a number."""
        return self.kind == NUMBER

    @property
    def as_count(self) -> Optional[int]:
        """The value of a positive integer without unit or comment, else None."""
        plain = (
            self.kind == NUMBER
            and not (self.unit or self.comment)
            and self.decimals == 0
            and self.value == int(self.value)
        )
        return int(self.value) if plain and self.value > 0 else None


@lru_cache(maxsize=4096)  # slips are undone on trial: the same cells are read again and again
def read_figure(text: str) -> Figure:
    """Parse one cell; every text is valid."""
    bare = _without_markup(text)
    plain = bare.rstrip("^†‡* ")
    if plain.lower() in _NONE or _UNIT_ALONE.fullmatch(plain):
        return Figure(EMPTY, plain, marks=bare[len(plain) :].strip())
    matched = _NUMBER.fullmatch(bare)
    if matched is None and plain[:1] in _BOUND_MARKS and _NUMBER.fullmatch(plain[1:].lstrip("= ")):
        return Figure(FAILED, plain)  # more than can be had, such as >32GiB: a bound, and no measurement
    if matched is None:
        return Figure(FAILED if _FAILED.fullmatch(plain) else TEXT, plain)
    digits = matched["number"].replace(",", "") + (matched["exponent"] or "")
    value = float(digits)
    decimals = len(matched["number"].partition(".")[2])
    exponent = int(matched["exponent"][1:]) if matched["exponent"] else 0
    half = 0.5 * 10.0 ** (exponent - decimals)
    if matched["about"] or "?" in matched["marks"]:
        half = max(half, 0.1 * abs(value))
    if matched["spread"]:
        half += float(matched["spread"]) * 10.0**exponent
    interval = Interval(max(0.0, value - half) if value >= 0 else value - half, value + half)
    if matched["last"] and float(matched["last"]) >= value >= 0:  # a range, whose middle counts as the value
        last = float(matched["last"])
        interval, value = Interval(interval.low, last + half), (value + last) / 2
    elif matched["last"]:
        return Figure(TEXT, plain)
    unit, comment = (matched["unit"] or "").strip(), (matched["comment"] or "")[1:-1].strip()
    return Figure(NUMBER, plain, value, decimals, unit, matched["marks"], interval, comment)


def _without_markup(text: str) -> str:
    """A cell without links, emphasis and parentheses around it; footnotes become the mark ``†``."""
    bare = _MARKS.sub("", _FOOTNOTE.sub("†", _LINK.sub(r"\1", _BREAK.sub(" ", text)))).strip()
    enclosed = _ENCLOSED.fullmatch(bare)
    if enclosed is None:
        return bare
    inside = next(filter(None, enclosed.groups())).strip()
    return inside if _NUMBER.fullmatch(inside) else bare


def bytes_of(figure: Figure, title_unit: str = "") -> Optional[Interval]:
    """Bytes of a memory size; None if its unit, or else that in the column's title, is not one of memory."""
    unit = _BYTES.get(_without_owner(figure.unit or title_unit))
    return figure.interval.times(unit) if figure.is_number and unit is not None else None


def seconds_of(figure: Figure, title_unit: str = "") -> Optional[Interval]:
    """Seconds of a time, which is in the unit of the column's title, or in seconds, if no unit is written; None if the
    unit is not one of time."""
    written = _without_owner(figure.unit or title_unit)
    unit = _SECONDS.get(written, None if written else 1.0)
    return figure.interval.times(unit) if figure.is_number and unit is not None else None


def is_thousands(figure: Figure) -> bool:
    """True if a cell is a count such as 2K, which may mean 2000 or 2048."""
    return figure.is_number and figure.unit.lower() == "k" and figure.value >= 1 and figure.value == int(figure.value)


def _without_owner(unit: str) -> str:
    """A unit in lower case, without what it is counted for: GB of GB / GPU, but GB/s of GB/s."""
    return _OWNER.sub("", unit.lower())


def simplest_integer(interval: Interval, preferred: Tuple[int, ...]) -> Optional[int]:
    """An integer in the interval: the first of ``preferred``, a power of two, or the only one; else None."""
    for value in preferred:
        if interval.overlaps(Interval(value, value)):
            return value
    power = 1
    while power <= interval.high:
        if power >= interval.low:
            return power
        power *= 2
    rounded = round(interval.middle) if interval.high < 2**53 else 0
    is_only = interval.high - interval.low < 1 and rounded > 0 and interval.overlaps(Interval(rounded, rounded))
    return rounded if is_only else None
