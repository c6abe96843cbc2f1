"""Filter expressions, such as ``layout.dp * layout.tp <= 8 and not node.tcmalloc``: parsed by :mod:`ast`, never run.

::

    or, and, not                        of true and false
    == != < <= > >=, in, not in         a < b < c as in mathematics; in: of a list, or of a text in a text
    + - * / % **                        of numbers; exponents from -64 to 64
    1  2.5  2e-4  1:30:00  "text"  true  false  null  (1, 2, 4)  [1, 2, 4]

Names are given by the caller: dotted keys of a configuration, or columns. Every mistake is reported with the file and
line, the expression, and the character in it.

Python parses a stand-in for the expression in which each token fills a cell of equal width and each literal or name is
the same identifier; so a node's column gives its token, and no literal of Python's (with its escapes, warnings and
limits) is ever read. Nodes outside a white-list are refused, and the tree is walked here.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from dataclasses import dataclass
from typing import Any, Callable, Collection, Dict, List, NoReturn, Tuple, Type, Union

from fugaku_gpt.config.expression_tokens import Token, Value, read_tokens
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import EXPONENT, EXPRESSION, EXPRESSION_LEVELS, cut

Lookup = Callable[[str], Value]

# of a number up to 1e308: the power has fewer than 65,536 bits before it is refused as too large
_MAX_EXPONENT = EXPONENT.value
_CELL = len("not in") + 1  # columns of a token in the text that Python parses
_OPERAND = "v"
_CLOSING = {"(": ")", "[": "]"}
_NO_VALUE = "stands where a value is expected"
_TOO_DEEP = f"more than {EXPRESSION_LEVELS} of signs and operators; brackets around groups of operands make fewer"
_MISSING_OPERATOR = re.compile(r"[v)\]] +(?=[v(\[]|not  )")  # between two operands
_ARITHMETIC: Dict[Type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ORDER: Dict[Type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_ALLOWED = (
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.UAdd, ast.USub, ast.BinOp, *_ARITHMETIC),
    *(ast.Compare, ast.Eq, ast.NotEq, *_ORDER, ast.In, ast.NotIn, ast.Tuple, ast.List, ast.Name, ast.Load),
)


@dataclass(frozen=True)
class _Source:
    """An expression's text, where it was written (``location``), and its tokens in order."""

    text: str
    location: str
    tokens: Tuple[Token, ...]

    @property
    def is_cut_off(self) -> bool:
        """True if it ends where an operand is expected."""
        return not self.tokens or (self.tokens[-1].kind == "sign" and self.tokens[-1].text not in _CLOSING.values())

    def token_of(self, node: ast.expr) -> Token:
        """The token with which a node begins."""
        return self.tokens[node.col_offset // _CELL]

    def operator_after(self, node: ast.expr) -> Token:
        """The operator that follows an operand and the brackets around it."""
        assert node.end_col_offset is not None
        index = (node.end_col_offset - 1) // _CELL + 1
        while self.tokens[index].text == ")":
            index += 1
        return self.tokens[index]

    def position_of(self, node: ast.expr) -> int:
        """The character, from 1, to which messages about a node point: its operator, or else its beginning."""
        if isinstance(node, ast.BoolOp):
            return self.operator_after(node.values[0]).position
        if isinstance(node, (ast.BinOp, ast.Compare)):
            return self.operator_after(node.left).position
        return self.token_of(node).position

    def fail(self, position: int, reason: str, subject: str = "") -> NoReturn:
        suffix = f" (in {subject})" if subject else ""
        raise ConfigError(f"{self.location}: {self.text!r}, character {position}: {reason}{suffix}")


class Expression:
    """A parsed expression, which is true or false for a row."""

    def __init__(self, source: _Source, tree: ast.expr) -> None:
        self._source, self._tree = source, tree

    @property
    def text(self) -> str:
        """The expression as it was written."""
        return self._source.text

    @property
    def names(self) -> List[str]:
        """The names in the expression, in the order of their first occurrence."""
        operands = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
        tokens = [self._source.token_of(node) for node in sorted(operands, key=lambda node: node.col_offset)]
        return list(dict.fromkeys(token.text for token in tokens if token.kind == "name"))

    @property
    def conjuncts(self) -> "List[Expression]":
        """The terms that ``and`` joins, from left to right; the expression holds where all of them do."""
        return [Expression(self._source, term) for term in _terms_of_and(self._tree)]

    @property
    def may_divide_by_zero(self) -> bool:
        """True if some values of its names cause a division by 0, or a power that is not a number."""
        return any(isinstance(node, ast.BinOp) and self._may_fail(node) for node in ast.walk(self._tree))

    def _may_fail(self, node: ast.BinOp) -> bool:
        if not isinstance(node.op, (ast.Div, ast.Mod, ast.Pow)):
            return False
        token = self._source.token_of(node.right) if isinstance(node.right, ast.Name) else None
        if token is None or token.kind != "literal":
            return True
        return not token.value and not isinstance(node.op, ast.Pow)

    def holds(self, lookup: Lookup, subject: str = "") -> bool:
        """True if the expression is true.

        Args:
            lookup: returns the value of a name.
            subject: the row that the values belong to, for messages.

        Raises:
            ConfigError: an operation is impossible with these values, or the result is neither true nor false.
        """
        value = _Evaluator(self._source, lookup, subject).value(self._tree)
        if not isinstance(value, bool):
            reason = f"is {_describe(value)}, neither true nor false"
            self._source.fail(self._source.position_of(self._tree), reason, subject)
        return value


def parse_expression(text: str, location: str, names: Collection[str]) -> Expression:
    """Parses an expression over ``names``.

    Args:
        location: file, line and key of the expression, for messages, such as ``sweep.yaml:7: where``.

    Raises:
        ConfigError: it is not a valid expression, or exceeds a limit.
    """
    if len(text) > EXPRESSION.value:
        raise ConfigError(f"{location}: an expression of {len(text)} characters; at most {EXPRESSION}")
    tokens = read_tokens(text, names, _Source(text, location, ()).fail)
    source = _Source(text, location, tuple(tokens))
    _check_brackets(source)
    tree = _parse(source)
    _check_tree(source, tree)
    return Expression(source, tree)


def _check_brackets(source: _Source) -> None:
    opened: List[Token] = []
    for token in source.tokens:
        if token.text in _CLOSING:
            opened.append(token)
        elif opened and token.text == _CLOSING[opened[-1].text]:
            opened.pop()
        if len(opened) > EXPRESSION_LEVELS.value:
            source.fail(token.position, f"more than {EXPRESSION_LEVELS} of brackets")
    if opened and not source.is_cut_off:
        source.fail(opened[-1].position, f"{opened[-1].text!r} has no {_CLOSING[opened[-1].text]!r}")


def _parse(source: _Source) -> ast.expr:
    cells = (token.text if token.kind == "sign" else _OPERAND for token in source.tokens)
    stand_in = "".join(cell.ljust(_CELL) for cell in cells)
    gap = _MISSING_OPERATOR.search(stand_in)
    if gap is not None:
        token = source.tokens[gap.end() // _CELL]
        if token.text == "not":
            source.fail(token.position, "not stands before what it negates, or as `not in`")
        source.fail(token.position, f"{token.text!r} is not expected here")
    try:
        return ast.parse(stand_in, mode="eval").body
    except SyntaxError as error:
        if source.is_cut_off:
            source.fail(len(source.text) + 1, "the expression ends where a value is expected")
        token = source.tokens[((error.offset or 1) - 1) // _CELL]
        reason = "is not expected here" if "unmatched" in error.msg else _NO_VALUE
        source.fail(token.position, f"{token.text!r} {reason}")
    except (RecursionError, MemoryError):
        source.fail(1, _TOO_DEEP)


def _check_tree(source: _Source, tree: ast.expr) -> None:
    """Refuses nodes outside the white-list, and a tree that is too deep to be walked by recursion."""
    level: List[Any] = [tree]
    for _ in range(EXPRESSION_LEVELS.value + 2):  # below the deepest operator are names, and Python's marks on them
        for node in level:
            if not isinstance(node, _ALLOWED):
                token = source.token_of(node)  # a starred operand: the other kinds cannot be written with these tokens
                source.fail(token.position, f"{token.text!r} {_NO_VALUE}")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    source.fail(source.position_of(tree), _TOO_DEEP)


def _terms_of_and(node: ast.expr) -> List[ast.expr]:
    if not (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)):
        return [node]
    return [term for operand in node.values for term in _terms_of_and(operand)]


class _Evaluator:
    """Computes the value of a checked tree for one row."""

    def __init__(self, source: _Source, lookup: Lookup, subject: str) -> None:
        self._source, self._lookup, self._subject = source, lookup, subject

    def value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            token = self._source.token_of(node)
            return token.value if token.kind == "literal" else self._lookup(token.text)
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.value(element) for element in node.elts)
        if isinstance(node, ast.BoolOp):
            if isinstance(node.op, ast.And):
                return all(self._truth(operand, "and") for operand in node.values)
            return any(self._truth(operand, "or") for operand in node.values)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        assert isinstance(node, ast.BinOp)
        return self._arithmetic(node)

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return not self._truth(node.operand, "not")
        number = self._number(node.operand, "a sign")
        return -number if isinstance(node.op, ast.USub) else number

    def _arithmetic(self, node: ast.BinOp) -> Value:
        token = self._source.operator_after(node.left)
        left, right = (self._number(operand, token.text) for operand in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_EXPONENT:
            self._fail(token.position, f"the exponent {right:g} is not from -{_MAX_EXPONENT} to {_MAX_EXPONENT}")
        try:
            result: Union[float, complex] = _ARITHMETIC[type(node.op)](left, right)
            if isinstance(result, complex):
                self._fail(token.position, f"{left:g} has no power {right:g}; a negative number takes whole exponents")
            if math.isfinite(result):
                return result
        except ZeroDivisionError:
            self._fail(token.position, "division by 0")
        except OverflowError:
            pass
        self._fail(token.position, "the number is too large")

    def _compare(self, node: ast.Compare) -> bool:
        values = [self.value(operand) for operand in (node.left, *node.comparators)]
        position = self._source.position_of(node)
        return all(
            self._relation(sign, left, right, position) for sign, left, right in zip(node.ops, values, values[1:])
        )

    def _relation(self, sign: ast.cmpop, left: Value, right: Value, position: int) -> bool:
        if isinstance(sign, (ast.Eq, ast.NotEq)):
            return self._equals(left, right, position) == isinstance(sign, ast.Eq)
        if isinstance(sign, (ast.In, ast.NotIn)):
            return self._contains(left, right, position) == isinstance(sign, ast.In)
        are_numbers = _is_number(left) and _is_number(right)
        if not are_numbers and not (isinstance(left, str) and isinstance(right, str)):
            self._fail(position, f"{_describe(left)} and {_describe(right)} have no order")
        return bool(_ORDER[type(sign)](left, right))

    def _equals(self, left: Value, right: Value, position: int) -> bool:
        if left is not None and right is not None and _kind(left) != _kind(right):
            self._fail(position, f"{_describe(left)} and {_describe(right)} are never equal")
        return left == right

    def _contains(self, left: Value, right: Value, position: int) -> bool:
        if isinstance(right, str) and isinstance(left, str):
            return left in right
        if not isinstance(right, tuple):
            self._fail(position, f"in stands before a list or a text, not before {_describe(right)}")
        return any(_kind(left) == _kind(element) and left == element for element in right)

    def _truth(self, node: ast.expr, operator_name: str) -> bool:
        value = self.value(node)
        if not isinstance(value, bool):
            reason = f"{operator_name} is of true and false, not of {_describe(value)}"
            self._fail(self._source.position_of(node), reason)
        return value

    def _number(self, node: ast.expr, operator_name: str) -> float:
        value = self.value(node)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            reason = f"{operator_name} is of numbers, not of {_describe(value)}"
            self._fail(self._source.position_of(node), reason)
        return value

    def _fail(self, position: int, reason: str) -> NoReturn:
        self._source.fail(position, reason, self._subject)


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Value) -> str:
    if value is None:
        return "null"
    return "number" if _is_number(value) else type(value).__name__


def _describe(value: Value) -> str:
    if value is None:
        return "null (not set)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "a list"
    return f"the text {cut(repr(value))}" if isinstance(value, str) else f"the number {value:g}"
