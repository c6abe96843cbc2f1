"""Finds the ends of quotes, brackets and expansions in the text of a shell script."""

from __future__ import annotations

import re

# a comment in `$(...)` may hold quotes and brackets that mean nothing
_BRACKET_MARKS = {")": re.compile(r"(?<=[\s;(])#[^\n]*|[()'\"\\`]"), "}": re.compile(r"[{}'\"\\`]")}
_BACKQUOTED = re.compile(r"`[^`\\]*(?:\\.[^`\\]*)*`", re.DOTALL)
_DOUBLE_QUOTE_MARKS = re.compile(r"[\"\\$`]")


def unescape(text: str) -> str:
    """Return the inside of double quotes without its backslashes."""
    return re.sub(r"\\([\"\\$`\n])", lambda match: "" if match[1] == "\n" else match[1], text) if "\\" in text else text


def end_of_expansion(text: str, position: int, level: int) -> int:
    """Return the end of what opens at ``position`` (``$(``, ``${``, a double quote or a backtick), or -1.

    Args:
        level: depth of nesting so far; too deep a nesting counts as unclosed.
    """
    if level > 40:
        return -1
    opening = text[position]
    if opening == "`":
        closing = _BACKQUOTED.match(text, position)
        return closing.end() if closing else -1
    if opening == "$":
        return end_of_bracket(text, position + 2, ")" if text[position + 1] == "(" else "}", level)
    position += 1
    while True:
        match = _DOUBLE_QUOTE_MARKS.search(text, position)
        if not match:
            return -1
        position = match.end()
        if match[0] == '"':
            return position
        if match[0] == "\\":
            position += 1
        elif match[0] == "`" or (text[position : position + 1] in ("(", "{")):
            position = end_of_expansion(text, match.start(), level + 1)
            if position < 0:
                return -1


def end_of_bracket(text: str, position: int, close: str, level: int) -> int:
    """Return the end of what opened before ``position`` and is closed by ``close``, or -1; see
    :func:`end_of_expansion`."""
    depth = 1
    while True:
        match = _BRACKET_MARKS[close].search(text, position)
        if not match:
            return -1
        position = match.end()
        mark = match[0]
        if mark == close:
            depth -= 1
            if depth == 0:
                return position
        elif mark[0] == "#":
            continue
        elif mark == "\\":
            position += 1
        elif mark == "'":
            end = text.find("'", position)
            if end < 0:
                return -1
            position = end + 1
        elif mark in '"`':
            position = end_of_expansion(text, match.start(), level + 1)
            if position < 0:
                return -1
        else:
            depth += 1
