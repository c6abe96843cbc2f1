"""Filter expressions, such as ``layout.dp * layout.tp <= 8 and not node.tcmalloc``: parsed and walked here, never run.

::

    or, and, not                        of true and false
    == != < <= > >=, in, not in         a < b < c as in mathematics; in: of a list, or of a text in a text
    + - * / %                           of numbers
    1  2.5  2e-4  1:30:00  "text"  true  false  null  (1, 2, 4)  [1, 2, 4]

Names are what the caller knows: dotted keys of a configuration, or columns. A mistake is told with its place: the file
and line, the expression, and the character in it.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from dataclasses import dataclass
from typing import Any, Callable, Collection, Dict, List, NoReturn, Optional, Tuple, Union

from fugaku_gpt.config.values import BadValue, parse_duration, parse_float
from fugaku_gpt.errors import ConfigError

Value = Union[None, bool, int, float, str, Tuple[Any, ...]]
Lookup = Callable[[str], Value]

MAX_LENGTH = 2000  # characters
MAX_DEPTH = 50  # levels of brackets and signs
_TOKEN = re.compile(
    r"\s*(?:(?P<clock>\d+:\d{1,2}(?::\d{1,2}(?:\.\d+)?)?)"
    r"|(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)"
    r"|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<sign>==|!=|<=|>=|[-+*/%<>()\[\],]))",
    re.ASCII,
)
_WORDS: Dict[str, Value] = {"true": True, "false": False, "null": None, "none": None}
_OPERATORS = ("and", "or", "not", "in")
_ARITHMETIC: Dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
_ORDER: Dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class _Token:
    kind: str  # clock, number, name, text, sign, word (an operator in letters), end
    text: str
    at: int  # character, from 1


@dataclass(frozen=True)
class _Node:
    """``kind`` is value, name, list, negative, not, and, or, compare, or one of ``+ - * / %``."""

    kind: str
    at: int
    parts: Tuple[_Node, ...] = ()
    value: Value = None  # of a value; the name; the operators of a comparison


class Expression:
    """One parsed expression, which says of a row whether it holds."""

    def __init__(self, text: str, place: str, tree: _Node) -> None:
        self.text, self.place, self._tree = text, place, tree

    @property
    def names(self) -> List[str]:
        """The names that it asks for, in the order in which they first stand."""
        return list(dict.fromkeys(_names(self._tree)))

    @property
    def conjuncts(self) -> "List[Expression]":
        """The parts of it that are joined by ``and``, from left to right; it holds where all of them do."""
        return [Expression(self.text, self.place, tree) for tree in _joined_by_and(self._tree)]

    @property
    def may_divide_by_zero(self) -> bool:
        """Whether there are values of its names with which it cannot be told for a division by 0."""
        return _divides(self._tree)

    def holds(self, lookup: Lookup, subject: str = "") -> bool:
        """Whether it is true.

        Args:
            lookup: value of a name.
            subject: what is being looked at, for messages.

        Raises:
            ConfigError: it asks for what cannot be done with these values, or is neither true nor false.
        """
        value = _Walker(self.text, self.place, lookup, subject).value(self._tree)
        if not isinstance(value, bool):
            _fail(self.text, self.place, self._tree.at, f"is {_words(value)}, neither true nor false", subject)
        return value


def parse_expression(text: str, place: str, known: Collection[str]) -> Expression:
    """An expression over ``known`` names.

    Args:
        place: where it is written, for messages, such as ``sweep.yaml:7: where``.

    Raises:
        ConfigError: it is none.
    """
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{place}: an expression of {len(text)} characters; at most {MAX_LENGTH}")
    return Expression(text, place, _Parser(text, place, known).whole())


class _Parser:
    """By recursive descent; each method reads one level of binding, loosest first."""

    def __init__(self, text: str, place: str, known: Collection[str]) -> None:
        self._text, self._place, self._known = text, place, known
        self._tokens = self._read(text)
        self._next = 0
        self._depth = 0

    def whole(self) -> _Node:
        node = self._or()
        if self._token.kind != "end":
            self._fail(self._token.at, f"{self._token.text!r} is not expected here")
        return node

    def _or(self) -> _Node:
        return self._joined("or", self._and)

    def _and(self) -> _Node:
        return self._joined("and", self._not)

    def _joined(self, word: str, part: Callable[[], _Node]) -> _Node:
        parts = [part()]
        at = self._token.at
        while self._accept(word):
            parts.append(part())
        return _Node(word, at, tuple(parts)) if len(parts) > 1 else parts[0]

    def _not(self) -> _Node:
        at = self._token.at
        if not self._accept("not"):
            return self._comparison()
        self._deeper(at)
        node = _Node("not", at, (self._not(),))
        self._depth -= 1
        return node

    def _comparison(self) -> _Node:
        parts, signs, at = [self._sum()], [], self._token.at
        while True:
            token = self._token
            if token.kind == "sign" and token.text in ("==", "!=", *_ORDER):
                self._next += 1
                signs.append(token.text)
            elif self._accept("in"):
                signs.append("in")
            elif token.text == "not" and token.kind == "word":
                self._next += 1
                if not self._accept("in"):
                    self._fail(token.at, "not stands before what it negates, or as `not in`")
                signs.append("not in")
            else:
                break
            parts.append(self._sum())
        return _Node("compare", at, tuple(parts), tuple(signs)) if signs else parts[0]

    def _sum(self) -> _Node:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> _Node:
        return self._chain(("*", "/", "%"), self._signed)

    def _chain(self, signs: Tuple[str, ...], part: Callable[[], _Node]) -> _Node:
        node = part()
        while self._token.kind == "sign" and self._token.text in signs:
            token = self._token
            self._next += 1
            node = _Node(token.text, token.at, (node, part()))
        return node

    def _signed(self) -> _Node:
        token = self._token
        if not self._accept("-", "+"):
            return self._atom()
        self._deeper(token.at)
        node = self._signed()
        self._depth -= 1
        return _Node("negative" if token.text == "-" else "positive", token.at, (node,))

    def _atom(self) -> _Node:
        token = self._token
        self._next += 1
        if token.kind in ("number", "clock"):
            return _Node("value", token.at, value=self._number(token))
        if token.kind == "text":
            return _Node("value", token.at, value=token.text[1:-1])
        if token.kind == "name":
            if token.text.lower() in _WORDS:
                return _Node("value", token.at, value=_WORDS[token.text.lower()])
            self._check(token)
            return _Node("name", token.at, value=token.text)
        if token.text in ("(", "["):
            return self._bracket(token)
        said = "the expression ends" if token.kind == "end" else f"{token.text!r} stands"
        self._fail(token.at, f"{said} where a value is expected")

    def _bracket(self, opened: _Token) -> _Node:
        close = ")" if opened.text == "(" else "]"
        self._deeper(opened.at)
        parts: List[_Node] = []
        listed = opened.text == "["
        while not (self._token.kind == "sign" and self._token.text == close):
            parts.append(self._or())
            if not self._accept(","):
                break
            listed = True
        self._depth -= 1
        if not self._accept(close):
            self._fail(opened.at, f"{opened.text!r} has no {close!r}")
        return _Node("list", opened.at, tuple(parts)) if listed or not parts else parts[0]

    def _number(self, token: _Token) -> Value:
        try:
            value = parse_duration(token.text) if token.kind == "clock" else parse_float(token.text)
        except BadValue as error:
            self._fail(token.at, f"{token.text}: {error}")
        if not math.isfinite(value):
            self._fail(token.at, f"{token.text}: the number is too large")
        plain = token.text.replace("_", "")
        return int(plain) if plain.isdigit() else value

    def _check(self, token: _Token) -> None:
        if token.text in self._known:
            return
        near = difflib.get_close_matches(token.text, self._known, n=1)
        near = near or [name for name in self._known if name.rpartition(".")[2] == token.text.rpartition(".")[2]]
        hint = f"did you mean {near[0]}?" if near else "a text stands in quotes"
        self._fail(token.at, f"unknown name {token.text}; {hint}")

    def _accept(self, *texts: str) -> bool:
        token = self._token
        if token.kind in ("sign", "word") and token.text in texts:
            self._next += 1
            return True
        return False

    def _deeper(self, at: int) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(at, f"more than {MAX_DEPTH} levels")

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _read(self, text: str) -> List[_Token]:
        tokens, start = [], 0
        while text[start:].strip():
            found = _TOKEN.match(text, start)
            if found is None or found.lastgroup is None:
                at = start + len(text[start:]) - len(text[start:].lstrip()) + 1
                hint = {"=": "; equal is ==", "&": "; write and", "|": "; write or", "!": "; write not"}
                quote = "; the text has no end" if text[at - 1] in "\"'" else ""
                self._fail(at, f"{text[at - 1]!r} means nothing here{hint.get(text[at - 1], quote)}")
            kind, word = found.lastgroup, found[found.lastgroup]
            if kind == "name" and word in _OPERATORS:
                kind = "word"
            tokens.append(_Token(kind, word, found.start(found.lastgroup) + 1))
            start = found.end()
        return [*tokens, _Token("end", "", len(text) + 1)]

    def _fail(self, at: int, why: str) -> NoReturn:
        _fail(self._text, self._place, at, why)


class _Walker:
    def __init__(self, text: str, place: str, lookup: Lookup, subject: str) -> None:
        self._text, self._place, self._lookup, self._subject = text, place, lookup, subject

    def value(self, node: _Node) -> Value:
        if node.kind == "value":
            return node.value
        if node.kind == "name":
            return self._lookup(str(node.value))
        if node.kind == "list":
            return tuple(self.value(part) for part in node.parts)
        if node.kind == "not":
            return not self._truth(node.parts[0], "not")
        if node.kind == "and":
            return all(self._truth(part, "and") for part in node.parts)
        if node.kind == "or":
            return any(self._truth(part, "or") for part in node.parts)
        if node.kind == "compare":
            return self._compare(node)
        if node.kind in ("negative", "positive"):
            number = self._number(node.parts[0], "a sign")
            return -number if node.kind == "negative" else number
        return self._arithmetic(node)

    def _arithmetic(self, node: _Node) -> Value:
        left, right = (self._number(part, node.kind) for part in node.parts)
        if node.kind in "/%" and right == 0:
            self._fail(node.at, "division by 0")
        try:
            result: float = _ARITHMETIC[node.kind](left, right)
            if math.isfinite(result):
                return result
        except OverflowError:
            pass
        self._fail(node.at, "the number is too large")

    def _compare(self, node: _Node) -> bool:
        assert isinstance(node.value, tuple)
        values = [self.value(part) for part in node.parts]
        return all(
            self._relation(sign, left, right, node.at) for sign, left, right in zip(node.value, values, values[1:])
        )

    def _relation(self, sign: str, left: Value, right: Value, at: int) -> bool:
        if sign in ("==", "!="):
            return self._same(left, right, at) == (sign == "==")
        if sign in ("in", "not in"):
            return self._contains(left, right, at) == (sign == "in")
        numbers = _is_number(left) and _is_number(right)
        if not numbers and not (isinstance(left, str) and isinstance(right, str)):
            self._fail(at, f"{_words(left)} and {_words(right)} have no order")
        return bool(_ORDER[sign](left, right))

    def _same(self, left: Value, right: Value, at: int) -> bool:
        if left is not None and right is not None and _kind(left) != _kind(right):
            self._fail(at, f"{_words(left)} and {_words(right)} are never equal")
        return left == right

    def _contains(self, left: Value, right: Value, at: int) -> bool:
        if isinstance(right, str) and isinstance(left, str):
            return left in right
        if not isinstance(right, tuple):
            self._fail(at, f"in stands before a list or a text, not before {_words(right)}")
        return any(_kind(left) == _kind(item) and left == item for item in right)

    def _truth(self, node: _Node, word: str) -> bool:
        value = self.value(node)
        if not isinstance(value, bool):
            self._fail(node.at, f"{word} is of true and false, not of {_words(value)}")
        return value

    def _number(self, node: _Node, word: str) -> float:
        value = self.value(node)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._fail(node.at, f"{word} is of numbers, not of {_words(value)}")
        return value

    def _fail(self, at: int, why: str) -> NoReturn:
        _fail(self._text, self._place, at, why, self._subject)


def _names(node: _Node) -> List[str]:
    own = [str(node.value)] if node.kind == "name" else []
    return own + [name for part in node.parts for name in _names(part)]


def _joined_by_and(node: _Node) -> List[_Node]:
    return [one for part in node.parts for one in _joined_by_and(part)] if node.kind == "and" else [node]


def _divides(node: _Node) -> bool:
    """Whether it divides by what is not a number other than 0."""
    if node.kind in ("/", "%") and not (node.parts[1].kind == "value" and node.parts[1].value):
        return True
    return any(_divides(part) for part in node.parts)


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Value) -> str:
    if value is None:
        return "null"
    return "number" if _is_number(value) else type(value).__name__


def _words(value: Value) -> str:
    if value is None:
        return "null (not set)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "a list"
    return f"the text {value!r}" if isinstance(value, str) else f"the number {value:g}"


def _fail(text: str, place: str, at: int, why: str, subject: Optional[str] = None) -> NoReturn:
    raise ConfigError(f"{place}: {text!r}, character {at}: {why}" + (f" (in {subject})" if subject else ""))
