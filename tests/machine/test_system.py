"""Tests that the system can be replaced: everything that depends on the kernel's files or answers asks one object."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

import fugaku_gpt
from fugaku_gpt.machine.system import System, this_system, use_system

PACKAGE = Path(fugaku_gpt.__file__).parent
CALLS = ("sched_getaffinity", "sched_setaffinity", "sysconf", "getpagesize", "machine")
# `data prepare` also runs where there is no affinity; the clock's ticks are a constant
ALLOWED = {
    ("cli/data.py", "sched_getaffinity"),
    ("hang/diagnosis.py", "sysconf"),
    # names of open files, which users state, and by which ranks read a file that has no other name
    ("cli/streamed_input.py", "/proc/"),
    ("cli/streamed_input.py", "/proc/self/fd/"),
    ("cli/streamed_input.py", "/proc/thread-self/fd/"),
}


def test_another_system_is_seen_while_its_context_is_open(tmp_path: Path) -> None:
    former = this_system()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "list").write_text("0-1,12-14,59\n")
    with use_system(System(tmp_path)) as system:
        assert this_system() is system and system.read("proc/none") is None
        assert system.read("proc/list") == "0-1,12-14,59"
        assert system.read_numbers("proc/list") == [0, 1, 12, 13, 14, 59] and system.read_numbers("proc/none") == []
        assert system.launcher_affinity() == []
    assert this_system() is former


@pytest.mark.slow
def test_nothing_else_reads_the_files_of_the_kernel_or_asks_it() -> None:
    users = {
        use
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != PACKAGE / "machine" / "system.py"
        for use in uses(ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(PACKAGE)))
    }
    assert users == ALLOWED


def uses(tree: ast.AST, name: str) -> Iterator["tuple[str, str]"]:
    """Literals that begin with /proc or /sys, and calls of functions that the system answers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("/proc", "/sys/")):
            yield name, node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            module = node.func.value
            if isinstance(module, ast.Name) and module.id in ("os", "platform", "resource"):
                yield name, node.func.attr
