"""A directive line cut into words, the way a shell cuts a command: quotes, backslashes, a comment at the end."""

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
_LONGEST_SUBSTITUTION = 4096


@dataclass(frozen=True)
class Words:
    """What a line falls into.

    Attributes:
        words: quotes removed.
        unbalanced: whether a quote is never closed; it then counts as if it were not there.
        substitutions: words with a blank inside a command substitution or template, which ``pjsub`` would cut there.
    """

    words: Tuple[str, ...]
    unbalanced: bool
    substitutions: Tuple[str, ...] = ()


def split_words(text: str) -> Words:
    """Cut ``text``; time is linear in its length, but for nested substitutions of at most a line's length."""
    words: List[str] = []
    substitutions: List[str] = []
    broken = {'"': False, "'": False, "`": False, "$": False}
    at, end = 0, len(text)
    while at < end:
        blank = _BLANK.match(text, at)
        if blank:
            at = blank.end()
            continue
        if text[at] == "#":  # a word that starts so ends the line
            break
        pieces: List[str] = []
        cut_by_pjsub = False
        while at < end and text[at] not in " \t\r\v\f":
            piece, at, whole = _piece(text, at, broken)
            cut_by_pjsub = cut_by_pjsub or (whole and bool(_BLANK.search(piece)))
            pieces.append(piece)
        word = "".join(pieces)
        words.append(word)
        if cut_by_pjsub:
            substitutions.append(word)
    return Words(tuple(words), broken['"'] or broken["'"], tuple(substitutions))


def _piece(text: str, at: int, broken: "dict[str, bool]") -> Tuple[str, int, bool]:
    """The next piece of a word from ``at``, where it ends, and whether it is a substitution or template."""
    first = text[at]
    if first == "'" and not broken["'"]:
        close = text.find("'", at + 1)
        if close >= 0:
            return text[at + 1 : close], close + 1, False
        broken["'"] = True
    if first == '"' and not broken['"']:
        found = _DOUBLE.match(text, at)
        if found:
            return _ESCAPED_IN_QUOTES.sub(r"\1", found[1]), found.end(), False
        broken['"'] = True
    if first in "'\"":
        return "", at + 1, False
    if first == "\\":
        return text[at + 1 : at + 2] or "\\", min(at + 2, len(text)), False
    if first in "$`{":
        stop = _substitution_end(text, at, broken)
        if stop > at:
            return text[at:stop], stop, True
        return first, at + 1, False
    plain = _PLAIN.match(text, at)
    assert plain is not None  # every other first character is handled above
    return plain[0], plain.end(), False


def _substitution_end(text: str, at: int, broken: "dict[str, bool]") -> int:
    """Where ``$(...)``, ``${...}``, ``{{...}}`` or a backquoted command that starts at ``at`` ends; ``at`` if none."""
    if text.startswith("$(", at):
        if broken["$"]:
            return at
        stop = _matching_parenthesis(text, at + 1)
        broken["$"] = stop < 0
        return max(stop, at)
    for pattern in (_VARIABLE, _TEMPLATE):
        found = pattern.match(text, at, at + _LONGEST_SUBSTITUTION)
        if found:
            return found.end()
    if text[at] == "`" and not broken["`"]:
        found = _BACKQUOTED.match(text, at)
        if found:
            return found.end()
        broken["`"] = True
    return at


def _matching_parenthesis(text: str, at: int) -> int:
    depth = 0
    for index in range(at, min(len(text), at + _LONGEST_SUBSTITUTION)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index + 1
    return -1


def split_list(text: str) -> Iterator[str]:
    """The items of a comma list; commas inside parentheses do not count."""
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
