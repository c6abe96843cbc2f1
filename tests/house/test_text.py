"""Tests of house rules on the text of every file that git tracks, and on the syntax trees of Python files."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Written in pieces, so that this file does not break its own rules.
UNWANTED: Dict[str, str] = {
    "a path of one machine": r"/(work|root)" + r"/",
    "a note to do something later": r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b",
    "a package index": r"https?" + r"://[^\s'\"]*(pypi|pythonhosted|download\.pytorch|anaconda)",
}


@functools.lru_cache(maxsize=None)
def tracked_files() -> List[Path]:
    """Returns the files that git tracks, or would track if all were added."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("rule", UNWANTED)
def test_no_file_contains(rule: str) -> None:
    violations = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content or not re.search(UNWANTED[rule].encode(), content):  # lines are looked at where it matters
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
            if re.search(UNWANTED[rule], line):
                violations.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not violations, f"{rule}:\n" + "\n".join(violations)


def _is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _runs_text(node: ast.AST) -> bool:
    """``eval(...)``, ``exec(...)``, ``os.system(...)``, ``os.popen(...)`` or ``shell=True``."""
    if isinstance(node, ast.keyword):
        return node.arg == "shell"
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    shell = isinstance(called, ast.Attribute) and _is_name(called.value, "os") and called.attr in ("system", "popen")
    return shell or _is_name(called, "eval", "exec")


def _makes_any_object(node: ast.AST) -> bool:
    """Readers that build whatever a file names: pickle, ``yaml.load``, ``allow_pickle=True``."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "pickle" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module == "pickle"
    if isinstance(node, ast.keyword):
        return node.arg == "allow_pickle" and not _is_false(node.value)
    return isinstance(node, ast.Attribute) and _is_name(node.value, "yaml") and node.attr in ("load", "unsafe_load")


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _names_mpi(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "mpi4py" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == "mpi4py"
    return isinstance(node, ast.Attribute) and _is_name(node.value, "MPI")


def _asks_for_torch_version(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_name(node.value, "torch") and node.attr in ("__version__", "version")


# rule: where it holds, where it does not, and what breaks it
RULES: Dict[str, Tuple[str, Tuple[str, ...], Callable[[ast.AST], bool]]] = {
    "nothing is run from text": ("", (), _runs_text),
    "a file is data, not objects": ("", (), _makes_any_object),
    "only comm says MPI": ("fugaku_gpt/", ("fugaku_gpt/comm/",), _names_mpi),
    # capabilities are probed by feature; a version is only ever reported
    "only compat and the start-up report ask torch for its version": (
        "fugaku_gpt/",
        ("fugaku_gpt/compat/", "fugaku_gpt/training/startup.py"),
        _asks_for_torch_version,
    ),
}


@functools.lru_cache(maxsize=None)
def violations() -> Dict[str, List[str]]:
    """Returns the places that break each rule; files are parsed once for all rules."""
    places: Dict[str, List[str]] = {rule: [] for rule in RULES}
    for path in tracked_files():
        if path.suffix != ".py":
            continue
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        for rule, (below, exempt, breaks) in RULES.items():
            if name.startswith(below) and not name.startswith(exempt):
                lines = text.splitlines()
                places[rule] += [
                    f"{name}:{number}: {lines[number - 1].strip()}" for number in _broken_at(nodes, breaks)
                ]
    return places


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_python_keeps_the_rule(rule: str) -> None:
    assert not violations()[rule], f"{rule}:\n" + "\n".join(violations()[rule])


def _broken_at(nodes: Iterable[ast.AST], breaks: Callable[[ast.AST], bool]) -> Iterator[int]:
    for node in nodes:
        if breaks(node):
            line_node = node.value if isinstance(node, ast.keyword) else node  # keywords carry no line in Python 3.8
            yield line_node.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("nothing is run from text", "run(command, shell=True)"),
        ("nothing is run from text", "eval(text)"),
        ("nothing is run from text", "os.system('ls')"),
        ("a file is data, not objects", "import pickle"),
        ("a file is data, not objects", "yaml.load(text)"),
        ("a file is data, not objects", "np.load(path, allow_pickle=True)"),
        ("only comm says MPI", "MPI.COMM_WORLD"),
        ("only comm says MPI", "from mpi4py import MPI"),
        ("only compat and the start-up report ask torch for its version", "torch.__version__ > '1.8'"),
    ],
)
def test_the_rule_sees(rule: str, text: str) -> None:
    assert list(_broken_at(ast.walk(ast.parse(text)), RULES[rule][2])) == [1]


def test_the_rules_let_ordinary_code_pass() -> None:
    text = "model.eval()\nyaml.safe_load(text)\nnp.load(path, allow_pickle=False)\ncli.exec"
    for _, _, breaks in RULES.values():
        assert not list(_broken_at(ast.walk(ast.parse(text)), breaks))


def test_commands_print_through_the_filter_alone() -> None:
    """Text of other programs must not steer the terminal: see ``fugaku_gpt.cli.output.echo``."""
    printing = re.compile(r"\bclick\.(?:echo|secho)\(|(?<![\w.])print\(")
    for path in sorted((ROOT / "fugaku_gpt" / "cli").rglob("*.py")):
        if path.name != "output.py":
            assert not printing.search(path.read_text(encoding="utf-8")), path


def test_texts_that_become_numbers_are_of_decimal_digits() -> None:
    """``"²".isdigit()`` is true, and ``int("²")`` fails."""
    for path in sorted((ROOT / "fugaku_gpt").rglob("*.py")):
        assert not re.search(r"\.is(?:digit|numeric)\(", path.read_text(encoding="utf-8")), path


def test_links_that_lead_to_themselves_are_no_traceback() -> None:
    """``Path.resolve`` raises a RuntimeError for them: see ``fugaku_gpt.input_files.resolved``."""
    for path in sorted((ROOT / "fugaku_gpt").rglob("*.py")):
        assert not re.search(r"(?<!__file__\))\.resolve\(\)", path.read_text(encoding="utf-8")), path
