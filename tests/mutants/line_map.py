"""Which test runs which line of the package, by one run of all quick tests under coverage."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence, Set

import coverage

from tests.mutants.source import statement_lines

QUICK = "not slow and not torch"


@dataclass(frozen=True)
class LineMap:
    """Tests of each line.

    Args:
        tests: file -> line -> ids of tests that run it; a line that runs when its module is imported has "" as well.
        seconds: id of a test -> seconds of processor time that it takes, under coverage.
        failed: ids of tests that fail without a mutant. They are never chosen.
    """

    tests: Dict[str, Dict[int, List[str]]]
    seconds: Dict[str, float]
    failed: List[str]

    def tests_of(self, root: Path, file: str, line: int) -> List[str]:
        """Ids of the tests that run the statement of a line, those of the module's own folder of tests first, then in
        files of increasing seconds. If it runs at the import, they are all tests that run any line of the module or of
        the modules that import it, and all of its folder of tests."""
        lines = self.tests.get(file, {})
        statement = statement_lines((root / file).read_text(encoding="utf-8"), line)
        names = {name for number in statement for name in lines.get(number, ())}
        folder = test_folder(file)
        if "" in names or not names:
            for module in (file, *importers(root, file)):
                names |= {name for tests in self.tests.get(module, {}).values() for name in tests}
            names |= {name for name in self.seconds if name.startswith(folder)}
        names -= {"", *self.failed}
        costs: Dict[str, float] = {}
        for name in names:
            costs[_file_of(name)] = costs.get(_file_of(name), 0.0) + self.seconds[name]
        return sorted(names, key=lambda name: (not name.startswith(folder), costs[_file_of(name)], name))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def test_folder(file: str) -> str:
    """The folder of tests that mirrors a module's room: ``tests/planner/`` of ``fugaku_gpt/planner/search/best.py``."""
    return "tests/" + "/".join(Path(file).parts[1:2]) + "/"


def importers(root: Path, file: str) -> Set[str]:
    """Files of the package that name the module in an import."""
    module = ".".join(Path(file).with_suffix("").parts)
    package, _, name = module.rpartition(".")
    marks = (f"import {module}\n", f"from {module} import", f"from {package} import {name}\n")
    return {
        str(path.relative_to(root))
        for path in (root / "fugaku_gpt").rglob("*.py")
        if any(mark in path.read_text(encoding="utf-8") for mark in marks)
    }


def make_line_map(root: Path, folder: Path, tests: Sequence[str]) -> LineMap:
    """Run the quick tests of a copy of the repository under coverage.

    Args:
        root: the copy.
        folder: for files of the measurement.
        tests: paths of tests, relative to the copy.

    Raises:
        RuntimeError: the tests could not be collected.
    """
    data, results = folder / "coverage", folder / "results.json"
    settings = folder / "coverage.ini"
    settings.write_text("[run]\ncore = ctrace\n", encoding="utf-8")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}"]
    command += [
        f"--source={root / 'fugaku_gpt'}",
        "-m",
        "pytest",
        *pytest_options(root),
        f"--line-map={results}",
        *tests,
    ]
    done = subprocess.run(command, cwd=root, env=environment(root), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1) or not results.is_file():
        raise RuntimeError(f"the tests cannot be run:\n{done.stdout.decode(errors='replace')[-4000:]}")
    measured = coverage.CoverageData(str(data))
    measured.read()
    contexts = {
        str(Path(file).relative_to(root.resolve())): measured.contexts_by_lineno(file)
        for file in measured.measured_files()
    }
    return LineMap(contexts, **json.loads(results.read_text(encoding="utf-8")))


def pytest_options(root: Path) -> List[str]:
    """Options of pytest of all runs: the same examples of properties each time, and no cache."""
    options = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.mutants.plugin"]
    return [*options, f"--rootdir={root}", "--hypothesis-seed=0", "-m", QUICK]


def environment(root: Path) -> Dict[str, str]:
    """The environment in which the package and the tests of the copy are imported."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def digest(root: Path, tests: Sequence[str]) -> str:
    """What a map is of: the texts of the package and of the tests, and the paths of tests."""
    total = hashlib.sha256(repr(list(tests)).encode())
    sources = [*(root / "fugaku_gpt").rglob("*.py"), *(root / "tests").rglob("*.py")]
    for path in sorted(path for path in sources if path.parent.name != "mutants"):
        total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()


def read_or_make(root: Path, folder: Path, tests: Sequence[str], file: Path) -> LineMap:
    """The map in a file, made anew where the package or its tests have changed since."""
    current = digest(root, tests)
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["digest"] == current:
            lines = {name: {int(line): ids for line, ids in of.items()} for name, of in content["tests"].items()}
            return LineMap(lines, content["seconds"], content["failed"])
    made = make_line_map(root, folder, tests)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"digest": current, "tests": made.tests, "seconds": made.seconds, "failed": made.failed}
    file.write_text(json.dumps(content), encoding="utf-8")
    return made
