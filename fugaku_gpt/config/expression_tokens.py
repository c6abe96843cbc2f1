"""Splits an expression into tokens, with the values of its literals, before Python parses their order."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import Any, Callable, Collection, Dict, List, NoReturn, Tuple, Union

from fugaku_gpt.config.values import BadValue, parse_duration, parse_float

Value = Union[None, bool, int, float, str, Tuple[Any, ...]]
Fail = Callable[[int, str], NoReturn]  # character (from 1), reason

_TOKEN = re.compile(
    r"\s*(?:(?P<clock>\d+:\d{1,2}(?::\d{1,2}(?:\.\d+)?)?)"
    r"|(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<sign>(?:not\s+in|not|and|or|in)(?![\w.])|\*\*|==|!=|<=|>=|[-+*/%<>()\[\],])"
    r"|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)"
    r"|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<unreadable>\S))",
    re.ASCII,
)
_CONSTANTS: Dict[str, Value] = {"true": True, "false": False, "null": None, "none": None}
_HINTS = {"=": "; equal is ==", "&": "; write and", "|": "; write or", "!": "; write not"}
_HINTS.update(dict.fromkeys("\"'", "; the text has no end"))


@dataclass(frozen=True)
class Token:
    """A word or sign of an expression.

    Attributes:
        kind: ``literal``, ``name`` or ``sign``; operators in letters are signs.
        text: its characters; ``not in`` has one space.
        position: its first character, counted from 1.
        value: the value of a literal.
    """

    kind: str
    text: str
    position: int
    value: Value = None


def read_tokens(text: str, names: Collection[str], fail: Fail) -> List[Token]:
    """Splits an expression into tokens; fails at a character that belongs to none, and at a name not in ``names``."""
    tokens = []
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        token = Token(kind, " ".join(match[kind].split()) if kind == "sign" else match[kind], match.start(kind) + 1)
        if kind == "unreadable":
            fail(token.position, f"{token.text!r} means nothing here{_HINTS.get(token.text, '')}")
        tokens.append(_with_value(token, fail))
    for token in tokens:
        if token.kind == "name" and token.text not in names:
            fail(token.position, f"unknown name {token.text}; {_hint(token.text, names)}")
    return tokens


def _with_value(token: Token, fail: Fail) -> Token:
    if token.kind in ("number", "clock"):
        return replace(token, kind="literal", value=_number(token, fail))
    if token.kind == "text":
        return replace(token, kind="literal", value=token.text[1:-1])
    if token.kind == "name" and token.text.lower() in _CONSTANTS:
        return replace(token, kind="literal", value=_CONSTANTS[token.text.lower()])
    return token


def _number(token: Token, fail: Fail) -> Union[int, float]:
    try:
        value = parse_duration(token.text) if token.kind == "clock" else parse_float(token.text)
    except BadValue as error:
        fail(token.position, f"{token.text}: {error}")
    if not math.isfinite(value):
        fail(token.position, f"{token.text}: the number is too large")
    digits = token.text.replace("_", "")
    return int(digits) if digits.isdecimal() else value


def _hint(name: str, names: Collection[str]) -> str:
    similar_names = difflib.get_close_matches(name, names, n=1)
    last_component = name.rpartition(".")[2]
    similar_names = similar_names or [
        candidate for candidate in names if candidate.rpartition(".")[2] == last_component
    ]
    return f"did you mean {similar_names[0]}?" if similar_names else "a text stands in quotes"
