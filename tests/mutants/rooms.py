"""The modules that are changed: rooms of plain data, without PyTorch, ranks, processes, locks and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

_ROOMS = ("config", "formulas", "layout", "pjm", "planner", "report")
_MODULES = {
    "jobs": (
        "billing",
        "build_recipe",
        "choices",
        "failure_causes",
        "missing",
        "node_report",
        "outcome",
        "plain_outcome",
        "plain_script",
        "render",
    ),
    "records": ("accounting", "job", "node_report", "operators", "run", "summary", "sweep", "text"),
    "sweep": ("expand", "file", "names", "plan"),
}
_NO_BEHAVIOUR = ("aarch64", "benchmarks", "house", "mutants")
_LEFT_OUT = ("fugaku_gpt/planner/search/plot.py", "fugaku_gpt/planner/tables/fit_plot.py")


def modules(root: Path, names: Sequence[str] = ("",)) -> List[str]:
    """Paths below the root of the modules whose path, without ``.py``, contains one of the texts."""
    package = root / "fugaku_gpt"
    paths = [path for room in _ROOMS for path in (package / room).rglob("*.py")]
    paths += [package / room / f"{name}.py" for room, names in _MODULES.items() for name in names]
    files = sorted(str(path.relative_to(root)) for path in paths)
    return [
        file
        for file in files
        if file not in _LEFT_OUT and (root / file).is_file() and any(name in file[: -len(".py")] for name in names)
    ]


def all_tests(root: Path) -> List[str]:
    """The folders and files of tests that look at what the package does, rather than at its text."""
    tests = root / "tests"
    paths = [path for path in tests.iterdir() if (path / "__init__.py").is_file() or path.match("test_*.py")]
    return sorted(str(path.relative_to(root)) for path in paths if path.name not in _NO_BEHAVIOUR)
