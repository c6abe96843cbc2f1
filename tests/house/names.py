"""Counts names, sizes and prose of the package, room by room, and lists names and prose of tests, benchmarks and docs.

A room is a folder (or a module) directly below ``fugaku_gpt/``. Every name that the code binds is counted once per
scope: functions, classes, parameters, locals, attributes, loop, ``with``, ``except``, comprehension and ``import as``
targets, class fields and module constants.

::

    python -m tests.house.names                    # table of all rooms
    python -m tests.house.names --list pjm         # each dialect name below a folder, as file:line: kind: name
    python -m tests.house.names --prose benchmarks # each fragment and banned phrase below a folder
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Set, Tuple, Union

from tests.house import prose

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_gpt"
FOLDERS = ("benchmarks", "tests", "docs", "integrations")  # held to the package's names and prose
QUOTING = ("tests/house/prose.py", "tests/house/test_names.py")  # these list or plant the banned phrases

# Words that say nothing about the thing that they name.
DIALECT = frozenset(
    ["found", "one", "words", "said", "known", "kept", "told", "whole", "place", "parts", "now"]
    + ["here", "others", "mine", "wanted", "near", "what", "apart", "held", "late", "its"]
)

# Words in this order are a term of the field, wherever a name has them; each with its reason.
ALLOWED: Dict[str, str] = {
    "in place": "PyTorch's term for an operation that writes over its input",
    "one forward one backward": "the name of the pipeline schedule 1F1B",
}

FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)
ScopeNode = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
AnyFunction = Union[ast.FunctionDef, ast.AsyncFunctionDef]


@dataclass(frozen=True)
class Binding:
    """A name bound by the code: its line, the kind of binding, and the name."""

    line: int
    kind: str
    name: str


@dataclass(frozen=True)
class RoomCounts:
    """Counts of one room; ``imports`` holds the other rooms that it imports."""

    files: int
    lines: int
    bindings: int
    dialect: int
    long_files: int
    functions: int
    long_functions: int
    wide_functions: int
    wide_commands: int
    fragments: int
    phrases: int
    imports: Set[str]


def components(name: str) -> List[str]:
    """Lower-case words of a snake_case or CamelCase name, without digits."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_dialect(name: str) -> bool:
    """True if a component of the name is a dialect word outside of the allowed terms."""
    spaced_name = f" {' '.join(components(name))} "
    for term in ALLOWED:
        spaced_name = spaced_name.replace(f" {term} ", " ")
    return not DIALECT.isdisjoint(spaced_name.split())


def bindings(tree: ast.AST) -> List[Binding]:
    """Every name bound in a module, once per scope and kind, in the order of lines."""
    first_of: Dict[Tuple[int, str, str], Binding] = {}
    for scope, line, kind, name in _bindings_in(tree, tree):
        if name.strip("_"):
            first_of.setdefault((id(scope), kind, name), Binding(line, kind, name))
    return sorted(first_of.values(), key=lambda binding: (binding.line, binding.name))


def _bindings_in(scope: ast.AST, node: ast.AST) -> Iterator[Tuple[ast.AST, int, str, str]]:
    """Yields scope, line, kind and name of what the children of a node bind."""
    for child in ast.iter_child_nodes(node):
        yield from _bound_by(scope, child)
        yield from _bindings_in(child if isinstance(child, ScopeNode) else scope, child)


def _bound_by(scope: ast.AST, node: ast.AST) -> Iterator[Tuple[ast.AST, int, str, str]]:
    """Yields what a node binds by itself, without its children."""
    if isinstance(node, FunctionNode):
        yield scope, node.lineno, "function", node.name
    elif isinstance(node, ast.ClassDef):
        yield scope, node.lineno, "class", node.name
    elif isinstance(node, ast.arg):
        yield scope, node.lineno, "parameter", node.arg
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield scope, node.lineno, "local", node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            if alias.asname:
                yield scope, node.lineno, "import as", alias.asname
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        kind = "constant" if isinstance(scope, ast.Module) else "field" if isinstance(scope, ast.ClassDef) else "local"
        yield scope, node.lineno, kind, node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield scope, node.lineno, "attribute", node.attr


def parameters(function: AnyFunction) -> List[str]:
    """Names of a function's parameters, without ``self`` and ``cls``."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def functions(tree: ast.AST) -> List[AnyFunction]:
    """Every function and method of a module."""
    return [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]


def length(function: AnyFunction) -> int:
    """Lines of a function, its docstring included and its decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_command(function: AnyFunction) -> bool:
    """True if a decorator makes the function a command of click."""
    called = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in function.decorator_list]
    return any(isinstance(name, ast.Attribute) and name.attr in ("command", "group") for name in called)


def imported_rooms(tree: ast.AST) -> Set[str]:
    """Rooms of the package that a module imports, at its top or inside functions."""
    modules: List[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
            modules += [f"{PACKAGE.name}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return {name.split(".")[1] for name in modules if name.startswith(PACKAGE.name + ".")}


def modules_below(folder: str = "") -> List[Path]:
    """Python files below a folder of the package or one of ``FOLDERS``, or the module of that name."""
    parent = ROOT if folder.partition("/")[0] in FOLDERS else PACKAGE
    if folder and not (parent / folder).exists():
        return [parent / f"{folder}.py"]
    # os.walk passes over folders that vanish meanwhile: pytest and editors make such beside the files
    return sorted(
        Path(path, name) for path, _, files in os.walk(parent / folder) for name in files if name.endswith(".py")
    )


def sources(modules: Sequence[Path]) -> Iterator[Tuple[Path, str]]:
    """Files and their texts, without those that are gone since they were listed."""
    for module in modules:
        with contextlib.suppress(FileNotFoundError):
            yield module, module.read_text(encoding="utf-8")


def room_of(module: Path) -> str:
    """Name of the folder or module directly below the package."""
    return module.relative_to(PACKAGE).parts[0].partition(".")[0]


def rooms() -> Dict[str, List[Path]]:
    """Room to its modules; a package's own ``__init__`` and ``__main__`` are no rooms."""
    modules_of: Dict[str, List[Path]] = {}
    for module in modules_below():
        if not room_of(module).startswith("__"):
            modules_of.setdefault(room_of(module), []).append(module)
    return modules_of


def parse(module: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(module.read_text(encoding="utf-8"), str(module))


def count(room: str, modules: Sequence[Path]) -> RoomCounts:
    """Counts of one room."""
    contents = dict(sources(modules))
    trees = [ast.parse(text, str(module)) for module, text in contents.items()]
    lines = [len(text.splitlines()) for text in contents.values()]
    bound = [binding for tree in trees for binding in bindings(tree)]
    defined = [function for tree in trees for function in functions(tree)]
    wide = [function for function in defined if len(parameters(function)) > 8]
    texts = [text for content in contents.values() for text in prose.texts_of(content)]
    return RoomCounts(
        files=len(contents),
        lines=sum(lines),
        bindings=len(bound),
        dialect=sum(is_dialect(binding.name) for binding in bound),
        long_files=sum(number > 400 for number in lines),
        functions=len(defined),
        long_functions=sum(length(function) > 60 for function in defined),
        wide_functions=len(wide),
        wide_commands=sum(is_command(function) for function in wide),
        fragments=sum(bool(prose.fragment_signs(text)) for text in texts),
        phrases=sum(len(prose.banned_phrases(text.content)) for text in texts),
        imports=set().union(*(imported_rooms(tree) for tree in trees)) - {room},
    )


def per_thousand(counts: Sequence[RoomCounts]) -> float:
    """Dialect names per 1000 bound names."""
    return 1000 * sum(room.dialect for room in counts) / sum(room.bindings for room in counts)


def table() -> str:
    """The table of all rooms, one line a room and one for the sum."""
    counts = {room: count(room, modules) for room, modules in rooms().items()}
    header = (
        f"{'room':<12}{'files':>6}{'lines':>7}{'>400':>5}{'functions':>10}{'>60':>4}{'>8 par.':>8}{'cli':>4}"
        f"{'names':>7}{'dialect':>8}{'/1000':>7}{'fragments':>10}{'phrases':>8}{'arrows':>7}  imports"
    )
    rows = [header] + [_row(room, [counts[room]], ", ".join(sorted(counts[room].imports))) for room in sorted(counts)]
    return "\n".join([*rows, _row("sum", list(counts.values()), "")])


def _row(name: str, counts: Sequence[RoomCounts], note: str) -> str:
    def total(field: str) -> int:
        return sum(getattr(room, field) for room in counts)

    cells = (
        f"{name:<12}{total('files'):>6}{total('lines'):>7}{total('long_files'):>5}{total('functions'):>10}"
        f"{total('long_functions'):>4}{total('wide_functions'):>8}{total('wide_commands'):>4}{total('bindings'):>7}"
        f"{total('dialect'):>8}{per_thousand(counts):>7.1f}{total('fragments'):>10}{total('phrases'):>8}"
        f"{sum(len(room.imports) for room in counts):>7}  {note}"
    )
    return cells.rstrip()


def dialect_list(folder: str) -> Iterator[str]:
    """Lines ``file:line: kind: name`` of the dialect names below a folder."""
    for module, source in sources(modules_below(folder)):
        for binding in bindings(ast.parse(source, str(module))):
            if is_dialect(binding.name):
                yield f"{module.relative_to(ROOT)}:{binding.line}: {binding.kind}: {binding.name}"


def prose_list(folder: str) -> Iterator[str]:
    """Lines ``file:line: kind: sign: text`` of fragments and banned phrases below a folder."""
    for module, source in sources(modules_below(folder)):
        file = module.relative_to(ROOT).as_posix()
        for text in prose.texts_of(source):
            phrases = prose.banned_phrases(text.content) if file not in QUOTING else []
            for sign in prose.fragment_signs(text) + [f"says {phrase!r}" for phrase in phrases]:
                yield f"{file}:{text.line}: {text.kind}: {sign}: {text.first_line}"


def main() -> None:
    """Prints the table, or the list of one folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    folders = f"a folder of the package ('.': all of it), {', '.join(FOLDERS)}"
    parser.add_argument("--list", metavar="FOLDER", help=f"List the dialect names below a folder: {folders}.")
    parser.add_argument("--prose", metavar="FOLDER", help="List the fragments and banned phrases below such a folder.")
    options = parser.parse_args()
    if options.list:
        print("\n".join(dialect_list(options.list)))
    elif options.prose:
        print("\n".join(prose_list(options.prose)))
    else:
        print(table())


if __name__ == "__main__":
    main()
