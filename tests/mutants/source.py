"""Mutants of a Python source text: one operator, constant, condition, loop, handler or decorator is changed.

The changes are cosmic-ray's, but for those between equality and identity. A mutant that does not compile, or is the
same program, is none.
"""

from __future__ import annotations

import ast
import difflib
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from cosmic_ray.ast import Visitor, ast_nodes, get_ast
from cosmic_ray.operators.provider import OperatorProvider

_NEEDS_ARGUMENTS = ("VariableReplacer", "VariableInserter")
# Between short strings, small integers and None, `==` and `is` differ by CPython's interning or not at all: no test can
# notice most such changes. Those into the opposite, such as `==` into `is not`, remain.
_IDENTITIES = tuple(
    f"ReplaceComparisonOperator_{change}" for change in ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
)
OPERATORS: Dict[str, Any] = {
    name: OperatorProvider()[name]() for name in OperatorProvider() if name not in (*_NEEDS_ARGUMENTS, *_IDENTITIES)
}


@dataclass(frozen=True)
class Mutant:
    """A changed program.

    Args:
        file: path below the repository's root.
        line: number of the first line that differs, from 1.
        operator: cosmic-ray's name of the change.
        before, after: the lines that differ, without indentation.
        text: the changed program.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    text: str

    @property
    def key(self) -> Tuple[str, str, str, str]:
        """File, operator, and both texts with single spaces: these stay equal when the line moves."""
        return self.file, self.operator, single_spaced(self.before), single_spaced(self.after)


def single_spaced(text: str) -> str:
    """The text with each stretch of white space as one space."""
    return " ".join(text.split())


class _NodeVisitor(Visitor):  # type: ignore[misc]
    """Applies one change to the node of a number in the order of the walk."""

    def __init__(self, number: int, operator: Any, index: int) -> None:
        self._number, self._operator, self._index = number, operator, index
        self._count = -1

    def visit(self, node: Any) -> Any:
        self._count += 1
        return self._operator.mutate(node, self._index) if self._count == self._number else node


def random_mutants(root: Path, file: str, seed: int) -> Iterator[Mutant]:
    """Yield mutants of a file in random order: one for each node of its tree that can be changed."""
    rng = random.Random(f"{seed} {file}")
    text = (root / file).read_text(encoding="utf-8")
    nodes = list(ast_nodes(get_ast(text)))
    numbers = list(range(len(nodes)))
    rng.shuffle(numbers)
    for number in numbers:
        changes = _changes(nodes[number])
        rng.shuffle(changes)
        mutants = (_mutant(file, text, number, name, index) for name, index in changes)
        mutant = next((mutant for mutant in mutants if mutant is not None), None)
        if mutant is not None:
            yield mutant


def mutants_of_lines(root: Path, file: str, lines: Sequence[str]) -> Iterator[Mutant]:
    """Yield all mutants of the lines with these texts."""
    text = (root / file).read_text(encoding="utf-8")
    source = [single_spaced(line) for line in text.split("\n")]
    for number, node in enumerate(ast_nodes(get_ast(text))):
        if not any(line in lines for line in source[node.start_pos[0] - 1 : node.end_pos[0]]):
            continue
        for name, index in _changes(node):
            position = list(OPERATORS[name].mutation_positions(node))[index]
            if any(source[line - 1] in lines for line in range(position[0][0], position[1][0] + 1)):
                mutant = _mutant(file, text, number, name, index)
                if mutant is not None:
                    yield mutant


def _changes(node: Any) -> List[Tuple[str, int]]:
    """All changes of one node: names of operators, each with the number of its change. The ``*`` and ``/`` between
    parameters are operators to parso, and to cosmic-ray."""
    if node.type == "operator" and node.parent is not None and node.parent.type in ("parameters", "lambdef"):
        return []
    return [
        (name, index)
        for name, operator in OPERATORS.items()
        for index, _ in enumerate(operator.mutation_positions(node))
    ]


def _mutant(file: str, text: str, number: int, name: str, index: int) -> Optional[Mutant]:
    changed = str(_NodeVisitor(number, OPERATORS[name], index).walk(get_ast(text)).get_code())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # such as `is` beside a literal
        try:
            if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
                return None
            compile(changed, file, "exec")
        except (SyntaxError, ValueError):
            return None
    line, before, after = _difference(text.split("\n"), changed.split("\n"))
    return Mutant(file, line, name, before, after, changed)


def _difference(before: List[str], after: List[str]) -> Tuple[int, str, str]:
    """The number of the first line that differs, and the differing lines of each text."""
    blocks = [
        block
        for block in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        if block[0] != "equal"
    ]
    first, last = blocks[0], blocks[-1]
    removed, added = before[first[1] : last[2]], after[first[3] : last[4]]
    blank = next(
        (offset for offset, line in enumerate(removed) if line.strip()), 0
    )  # cosmic-ray takes a prefix with it
    return first[1] + 1 + blank, "\n".join(removed).strip(), "\n".join(added).strip()


def is_in_function(text: str, line: int) -> bool:
    """True of lines in bodies of functions, which run at calls; decorators and defaults run where the module is
    imported, which may be in the middle of a test."""
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body[0].lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
    )


def statement_lines(text: str, line: int) -> range:
    """The lines of the innermost statement around a line; of a compound statement, those of its head."""
    smallest = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt):
            continue
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        body = getattr(node, "body", None)
        end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
        end = max(end, start + 1)
        if start <= line < end and (len(smallest) == 1 or end - start < len(smallest)):
            smallest = range(start, end)
    return smallest
