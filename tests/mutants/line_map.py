"""Which test runs which line of the package, by one run of all quick tests under coverage."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Dict, List, Sequence, Set, Tuple

import coverage

from tests.mutants.source import is_in_function, statement_lines

QUICK = "not slow and not torch"
PARAMETERS = 50  # of a function of tests, before other functions have their turn


@dataclass(frozen=True)
class LineMap:
    """Tests of each line.

    Args:
        tests: file -> line -> ids of tests that run it; a line that runs when its module is imported has "" as well.
        seconds: id of a test -> seconds of processor time that it takes, under coverage. They bound the time of a run,
            and choose nothing: a machine under load measures others.
        failed: ids of tests that fail without a mutant. They are never chosen.
    """

    tests: Dict[str, Dict[int, List[str]]]
    seconds: Dict[str, float]
    failed: List[str]

    def tests_of(self, root: Path, file: str, line: int) -> List[str]:
        """Ids of the tests that run the statement of a line: first those of the file that mirrors the module, then
        those of its folder and of the room; at equal distance those that run the fewest lines of the package. Of a
        function with many parameters, some come first, and the others after the other tests. If the line runs at the
        import, they are all tests that run any line of the module, then all of its folder of tests and those of the
        modules that import it; first those whose parameter is the module."""
        lines = self.tests.get(file, {})
        text = (root / file).read_text(encoding="utf-8")
        statement = statement_lines(text, line)
        names = {name for number in statement for name in lines.get(number, ())}
        folder = test_folder(file)
        is_run_by_calls = is_in_function(text, line) and "" not in names
        own = names if is_run_by_calls and names else {name for tests in lines.values() for name in tests}
        shared: Set[str] = set()
        if own is not names:
            shared = {name for name in self.seconds if f"[{file}]" in name}
            names = {name for name in self.seconds if name.startswith(folder)} | shared | own
            for module in importers(root, file):
                names |= {name for tests in self.tests.get(module, {}).values() for name in tests}
        names = names - {"", *self.failed}
        in_order, turns = sorted(names, key=lambda name: (self.line_counts[name], name)), Counter[str]()
        rank: Dict[str, Tuple[bool, bool, int, int]] = {}
        for name in in_order:
            function = name.partition("[")[0]
            rank[name] = name not in shared, name not in own, turns[function] // PARAMETERS, distance(name, file)
            turns[function] += 1
        return sorted(in_order, key=lambda name: rank[name])

    @cached_property
    def line_counts(self) -> Dict[str, int]:
        """Lines of the package that each test runs: its size on any machine."""
        counts = dict.fromkeys(self.seconds, 0)
        for tests_of_line in self.tests.values():
            for names in tests_of_line.values():
                for name in set(names) - {""}:
                    counts[name] += 1
        return counts


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def test_folder(file: str) -> str:
    """The folder of tests that mirrors a module's room: ``tests/planner/`` of ``fugaku_gpt/planner/search/best.py``."""
    return "tests/" + "/".join(Path(file).parts[1:2]) + "/"


def distance(test: str, file: str) -> int:
    """Steps up from the file of tests that mirrors a module to the first folder that holds the test as well: 0 of a
    test in ``tests/planner/search/test_best.py`` for ``fugaku_gpt/planner/search/best.py``, 1 of its neighbours."""
    mirror = Path(file).with_suffix("").parts[1:]
    folder, _, name = _file_of(test).rpartition("/")
    shared = 0
    for own, other in zip(mirror, (*Path(folder).parts[1:], name[len("test_") : -len(".py")])):
        if own != other:
            break
        shared += 1
    return len(mirror) - shared


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


def read_or_make(root: Path, folder: Path, tests: Sequence[str], file: Path) -> LineMap:
    """The map in a file, brought up to date: files of tests that are new or have changed are run again, and lines of
    the package that have moved are followed. What changed helpers of tests do is not seen: remove the file.

    Raises:
        RuntimeError: the tests could not be collected.
    """
    sources = {str(path.relative_to(root)): path.read_text("utf-8") for path in (root / "fugaku_gpt").rglob("*.py")}
    digests = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in test_files(root, tests)}
    old = {"ids": [], "tests": {}, "seconds": {}, "failed": [], "sources": {}, "digests": {}}
    if file.is_file():
        old.update(json.loads(file.read_text(encoding="utf-8")))
    changed = [name for name in digests if old["digests"].get(name) != digests[name]]
    remaining = set(digests) - set(changed)
    lines: Dict[str, Dict[int, Set[str]]] = {}
    for name, tests_of_line in old["tests"].items():
        moved = moved_lines(old["sources"][name], sources.get(name, ""))
        for line, ids in tests_of_line.items():
            if int(line) in moved:
                names = (old["ids"][number] for number in ids)
                unchanged = {test for test in names if not test or _file_of(test) in remaining}
                lines.setdefault(name, {}).setdefault(moved[int(line)], set()).update(unchanged)
    seconds = {test: value for test, value in old["seconds"].items() if _file_of(test) in remaining}
    failed = [test for test in old["failed"] if _file_of(test) in remaining]
    if changed:
        made = make_line_map(root, folder, changed)
        for name, ids_of_line in made.tests.items():
            for line, ids in ids_of_line.items():
                lines.setdefault(name, {}).setdefault(line, set()).update(ids)
        seconds.update(made.seconds)
        failed += made.failed
    result = LineMap(
        {name: {line: sorted(ids) for line, ids in of.items()} for name, of in lines.items()}, seconds, failed
    )
    numbers = {name: number for number, name in enumerate(["", *seconds])}  # a name is in thousands of lines
    tests_of_lines = {
        name: {line: [numbers[test] for test in ids] for line, ids in of.items()} for name, of in result.tests.items()
    }
    content = {"ids": list(numbers), "tests": tests_of_lines, "seconds": seconds, "failed": failed}
    content.update(sources=sources, digests=digests)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
    return result


def test_files(root: Path, tests: Sequence[str]) -> List[str]:
    """The files of tests below the paths."""
    files = [
        path
        for name in tests
        for path in ((root / name).rglob("test_*.py") if (root / name).is_dir() else [root / name])
    ]
    return sorted({str(path.relative_to(root)) for path in files})


def moved_lines(before: str, after: str) -> Dict[int, int]:
    """The numbers, from 1, of the lines of a text that are in the other text as well, and their numbers there."""
    if before == after:
        return {number: number for number in range(1, before.count("\n") + 2)}
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    return {
        block.a + offset + 1: block.b + offset + 1
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }
