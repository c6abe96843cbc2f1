"""Splits a directive line into words as a shell does: quotes, backslashes, a comment at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterator, List, Tuple

_BLANK = re.compile(r"[ \t\r\v\f]+")
_PLAIN = re.compile(r"[^ \t\r\v\f\"'\\`${]+")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r'\\(["\\])')
_VARIABLE = re.compile(r"\$\{[^{}]*\}")
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\{%[^{}%]*%\}")
_BACKQUOTED = re.compile(r"`[^`]*`")
_MAX_SUBSTITUTION_LENGTH = 4096


@dataclass(frozen=True)
class SplitLine:
    """The words of a line.

    Attributes:
        tokens: the words, quotes removed.
        unbalanced: whether a quote is never closed; it then counts as absent.
        substitutions: words with a blank inside a command substitution or template, where ``pjsub`` would split them.
    """

    tokens: Tuple[str, ...]
    unbalanced: bool
    substitutions: Tuple[str, ...] = ()


def split_line(text: str) -> SplitLine:
    """Split ``text``; the time is linear in its length, except for nested substitutions of at most a line's length."""
    tokens: List[str] = []
    substitutions: List[str] = []
    unclosed = {'"': False, "'": False, "`": False, "$": False}
    position, end = 0, len(text)
    while position < end:
        blank = _BLANK.match(text, position)
        if blank:
            position = blank.end()
            continue
        if text[position] == "#":  # a comment ends the line
            break
        pieces: List[str] = []
        is_cut_by_pjsub = False
        while position < end and text[position] not in " \t\r\v\f":
            piece, position, is_substitution = _next_piece(text, position, unclosed)
            is_cut_by_pjsub = is_cut_by_pjsub or (is_substitution and bool(_BLANK.search(piece)))
            pieces.append(piece)
        token = "".join(pieces)
        tokens.append(token)
        if is_cut_by_pjsub:
            substitutions.append(token)
    return SplitLine(tuple(tokens), unclosed['"'] or unclosed["'"], tuple(substitutions))


def _next_piece(text: str, position: int, unclosed: "dict[str, bool]") -> Tuple[str, int, bool]:
    """Return the piece of a word at ``position``, its end, and whether it is a substitution or template."""
    first = text[position]
    if first == "'" and not unclosed["'"]:
        close = text.find("'", position + 1)
        if close >= 0:
            return text[position + 1 : close], close + 1, False
        unclosed["'"] = True
    if first == '"' and not unclosed['"']:
        quoted = _DOUBLE.match(text, position)
        if quoted:
            return _ESCAPED_IN_QUOTES.sub(r"\1", quoted[1]), quoted.end(), False
        unclosed['"'] = True
    if first in "'\"":
        return "", position + 1, False
    if first == "\\":
        return text[position + 1 : position + 2] or "\\", min(position + 2, len(text)), False
    if first in "$`{":
        stop = _substitution_end(text, position, unclosed)
        if stop > position:
            return text[position:stop], stop, True
        return first, position + 1, False
    match = _PLAIN.match(text, position)
    assert match is not None  # every other first character is handled above
    return match[0], match.end(), False


def _substitution_end(text: str, position: int, unclosed: "dict[str, bool]") -> int:
    """Return the end of ``$(...)``, ``${...}``, ``{{...}}`` or a backquoted command; ``position`` if there is none."""
    if text.startswith("$(", position):
        if unclosed["$"]:
            return position
        stop = _matching_parenthesis(text, position + 1)
        unclosed["$"] = stop < 0
        return max(stop, position)
    for pattern in (_VARIABLE, _TEMPLATE):
        match = pattern.match(text, position, position + _MAX_SUBSTITUTION_LENGTH)
        if match:
            return match.end()
    if text[position] == "`" and not unclosed["`"]:
        match = _BACKQUOTED.match(text, position)
        if match:
            return match.end()
        unclosed["`"] = True
    return position


def _matching_parenthesis(text: str, position: int) -> int:
    depth = 0
    for index in range(position, min(len(text), position + _MAX_SUBSTITUTION_LENGTH)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index + 1
    return -1


def split_list(text: str) -> Iterator[str]:
    """Yield the items of a comma list; commas inside parentheses do not count."""
    depth = start = 0
    for index, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth = max(0, depth - 1)
        elif character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]
