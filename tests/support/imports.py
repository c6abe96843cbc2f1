"""Reads the imports of a test file from its text, which shows before any import whether it needs PyTorch or MPI."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import FrozenSet, Optional, Tuple

ROOT = Path(__file__).resolve().parents[2]
TRAINING = frozenset({"torch", "mpi4py"})

# Statements that begin a line: imports of a function or under `if TYPE_CHECKING` are indented. There is no syntax tree,
# since parsing every file takes seconds.
_IMPORT = re.compile(r"^import ([\w.]+)|^from ([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)


@functools.lru_cache(maxsize=None)  # asked for each test of a file
def needs_training(path: Path) -> bool:
    """Whether importing a file of the repository imports PyTorch or mpi4py, directly or through other files of it."""
    pending, seen = [path], {path}
    while pending:
        for name in imported_names(pending.pop()):
            if name.partition(".")[0] in TRAINING:
                return True
            for file in _files_of(name):
                if file not in seen:
                    seen.add(file)
                    pending.append(file)
    return False


@functools.lru_cache(maxsize=None)
def imported_names(path: Path) -> FrozenSet[str]:
    """Dotted names that the top level of a file imports; ``from a import b`` gives ``a`` and ``a.b``."""
    names = set()
    for module, package, attributes in _IMPORT.findall(path.read_text(encoding="utf-8")):
        names |= {module} if module else {package, *(f"{package}.{name}" for name in re.findall(r"\w+", attributes))}
    return frozenset(names)


@functools.lru_cache(maxsize=None)
def _files_of(name: str) -> Tuple[Path, ...]:
    """The files of the repository that run when a dotted name is imported: the module, and the packages above it."""
    components = name.split(".")
    files = (_module_file("/".join(components[:length])) for length in range(1, len(components) + 1))
    return tuple(file for file in files if file is not None)


@functools.lru_cache(maxsize=None)
def _module_file(relative: str) -> Optional[Path]:
    if relative.startswith(("fugaku_gpt", "tests", "benchmarks")):
        candidates = [ROOT / f"{relative}.py", ROOT / relative / "__init__.py"]
    else:  # tests of benchmarks import these programs by their bare names, as they import each other
        candidates = [ROOT / "benchmarks" / f"{relative}.py"]
    return next((file for file in candidates if file.is_file()), None)
