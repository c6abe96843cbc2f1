"""No function has so many parameters that a call of it cannot be read: what belongs together is a dataclass."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator, Tuple

import fugaku_gpt

MOST = 8
FORCED = {("parallel/cross_entropy.py", "forward")}  # autograd passes tensors one by one, and only as arguments


def crowded_functions() -> Iterator[Tuple[str, str]]:
    """(file, name) of each function with more than ``MOST`` parameters, ``self`` and ``cls`` apart."""
    root = Path(fugaku_gpt.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([one for one in arguments if one.arg not in ("self", "cls")]) > MOST:
                    yield str(path.relative_to(root)), node.name


def test_no_function_has_more_parameters_than_can_be_read() -> None:
    assert set(crowded_functions()) == FORCED
