"""The modules that are changed: rooms of plain data, without PyTorch, ranks, processes, locks and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import List

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
    "sweep": ("expand", "expression", "expression_tokens", "file", "names", "plan"),
}
_LEFT_OUT = ("fugaku_gpt/planner/search/plot.py", "fugaku_gpt/planner/tables/fit_plot.py")


def modules(root: Path, part: str = "") -> List[str]:
    """Paths below the root of the modules whose path, without ``.py``, contains the text."""
    package = root / "fugaku_gpt"
    paths = [path for room in _ROOMS for path in (package / room).rglob("*.py")]
    paths += [package / room / f"{name}.py" for room, names in _MODULES.items() for name in names]
    files = sorted(str(path.relative_to(root)) for path in paths)
    return [file for file in files if file not in _LEFT_OUT and part in file[: -len(".py")] and (root / file).is_file()]
