"""Text of jobs, logs, files and environments, in the form in which each output shows it and obeys nothing of it."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_PLAIN = "\n\t\u200c\u200d"
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_FORMULA = "=+-@\t\uff1d\uff0b\uff0d\uff20"  # and the wide forms of the signs, which some spreadsheets take for them


def harmless(text: str) -> str:
    """Escape what a terminal or an editor would obey instead of showing: control characters except ends of lines and
    tabs, marks that turn the direction of writing, and bytes that are no text. Spaces of every script, and the joiners
    that scripts and emoji are written with, stay."""
    if text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(mark if mark.isprintable() or _is_plain(mark) else repr(mark)[1:-1] for mark in line)


def _is_plain(mark: str) -> bool:
    return mark in _PLAIN or unicodedata.category(mark) == "Zs"


def markdown_cell(text: str) -> str:
    """A text as a cell of a Markdown table: harmless, on one line, with no bar, tag or picture of its own."""
    line = harmless(" ".join(text.splitlines())).replace("\t", " ").replace("|", "\\|")
    return _TAG.sub("&lt;", line).replace("![", "!\\[")


def csv_cell(value: Any) -> Any:
    """A value as a cell that a spreadsheet does not compute: a text that begins as a formula gets an apostrophe.

    None is an empty cell, and a number in a text stays, with its sign.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return value if isinstance(value, (int, float)) else csv_cell(str(value))
    text = harmless(value)
    return f"'{text}" if len(text) > 1 and text[0] in _FORMULA and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
