"""One mutant in a copy of the repository: the tests that run its line are run until one fails."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List, NoReturn, Sequence

import pytest

from tests.mutants.line_map import LineMap, environment, pytest_options, test_folder
from tests.mutants.source import Mutant

NOTICED, SURVIVED, TIMED_OUT = "noticed", "survived", "timed out"
_START = 20.0  # seconds of processor time of a start of pytest and its imports, at most
_SLOWER = 5.0  # times the seconds of the tests without a mutant
_WAITING = 10.0  # seconds for each second of processor time, on a busy machine
# imported before a fork: neither the package nor its tests
_LIBRARIES = (
    "hypothesis.strategies",
    "jinja2",
    "numpy",
    "rich.console",
    "rich.table",
    "yaml",
    "click.testing",
    "psutil",
)
_NOT_STARTED = 70  # exit code; those of pytest end with 5
_ADDRESS_SPACE = 8 * 2**30  # bytes


def copy_repository(root: Path, copy: Path) -> None:
    """Copy the files that git tracks or would track; a test may read any of them."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (root / name).is_symlink() or (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)


def chosen_tests(tests: Sequence[str], count: int) -> List[str]:
    """The first tests, up to a number of them; those of a file follow each other."""
    chosen = list(tests[:count])
    files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
    return sorted(chosen, key=lambda name: files.index(name.partition("::")[0]))


def run_tests(copy: Path, folder: Path, tests: Sequence[str], seconds: float) -> str:
    """Run tests of the copy until one fails; returns whether the change was noticed.

    They run in a fork of this process, which has imported pytest and other libraries: their start takes longer than
    most tests.

    Args:
        folder: for the list of the tests.
        seconds: of processor time that these tests take without a mutant.

    Raises:
        RuntimeError: there are no such tests, or pytest cannot be started.
    """
    if not tests:
        return SURVIVED
    chosen = folder / "chosen.json"
    chosen.write_text(json.dumps(list(tests)), encoding="utf-8")
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    arguments = [*pytest_options(copy), "-x", f"--chosen-tests={chosen}", *files]
    for name in _LIBRARIES:
        importlib.import_module(name)
    limit = int(_START + _SLOWER * seconds)
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        _run_in_fork(copy, arguments, limit)
    code = _exit_code(process, limit * _WAITING)
    if code in (pytest.ExitCode.NO_TESTS_COLLECTED, _NOT_STARTED):
        raise RuntimeError(f"pytest cannot run the tests {', '.join(tests)}")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return TIMED_OUT
    return SURVIVED if code == 0 else NOTICED


def _run_in_fork(copy: Path, arguments: List[str], limit: int) -> NoReturn:
    """Become a process of its own, without the modules of the checkout, that runs pytest in the copy."""
    code = _NOT_STARTED
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        for name in [name for name in sys.modules if name.partition(".")[0] in ("fugaku_gpt", "tests")]:
            del sys.modules[name]
        os.chdir(copy)
        os.environ.update({**environment(copy), "PYTHONDONTWRITEBYTECODE": "1"})
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copy))
        sys.argv = ["pytest", *arguments]
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def _exit_code(process: int, seconds: float) -> int:
    """Wait for a process; returns its exit code, or minus the signal that ended it. What it has started ends, too."""
    deadline = time.monotonic() + seconds
    ended, status = 0, 0
    try:
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            time.sleep(0 if ended else 0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(process, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def try_mutant(copy: Path, folder: Path, mutant: Mutant, tests: Sequence[str], lines: LineMap) -> str:
    """Write the mutant into the copy, run the tests, and restore the file. Those of the module's own folder run
    first, and the wider set only when they pass: to import dozens of files of tests takes longer than most tests."""
    path = copy / mutant.file
    original = path.read_bytes()
    # Python compares the time of a file in seconds, and its size: a compiled module could be taken for the mutant's.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(mutant.text, encoding="utf-8")
    own = [name for name in tests if name.startswith(test_folder(mutant.file))]
    try:
        for group in (own, [name for name in tests if name not in own]):
            result = run_tests(copy, folder, group, sum(lines.seconds[name] for name in group))
            if result != SURVIVED:
                return result
        return SURVIVED
    finally:
        path.write_bytes(original)
