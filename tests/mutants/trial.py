"""One mutant in a copy of the repository: the tests that run its line are run until one fails."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import List, Sequence

import pytest

from tests.mutants.line_map import LineMap, environment, pytest_command
from tests.mutants.source import Mutant

NOTICED, SURVIVED, TIMED_OUT = "noticed", "survived", "timed out"
_START = 20.0  # seconds of processor time of a start of pytest and its imports, at most
_SLOWER = 5.0  # times the seconds of the tests without a mutant
_WAITING = 10.0  # seconds for each second of processor time, on a busy machine
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


def chosen_tests(tests: Sequence[str], lines: LineMap, seconds: float) -> List[str]:
    """The first tests that take that many seconds together, and one at least."""
    chosen: List[str] = []
    for name in tests:
        if chosen and seconds < lines.seconds[name]:
            break
        seconds -= lines.seconds[name]
        chosen.append(name)
    return chosen


def run_tests(copy: Path, folder: Path, tests: Sequence[str], seconds: float) -> str:
    """Run tests of the copy until one fails; returns whether the change was noticed.

    Args:
        folder: for the list of the tests.
        seconds: of processor time that these tests take without a mutant.

    Raises:
        RuntimeError: there are no such tests.
    """
    if not tests:
        return SURVIVED
    chosen = folder / "chosen.json"
    chosen.write_text(json.dumps(list(tests)), encoding="utf-8")
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    limit = _START + _SLOWER * seconds

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))

    process = subprocess.Popen(
        [sys.executable, *pytest_command(copy), "-x", f"--chosen-tests={chosen}", *files],
        cwd=copy,
        env={**environment(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=limits,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=limit * _WAITING)
    except subprocess.TimeoutExpired:
        code = -signal.SIGXCPU
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f"pytest does not know the tests {', '.join(tests)}")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return TIMED_OUT
    return SURVIVED if code == 0 else NOTICED


def try_mutant(copy: Path, folder: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> str:
    """Write the mutant into the copy, run the tests, and restore the file."""
    path = copy / mutant.file
    original = path.read_bytes()
    # Python compares the time of a file in seconds, and its size: a compiled module could be taken for the mutant's.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(mutant.text, encoding="utf-8")
    try:
        return run_tests(copy, folder, tests, seconds)
    finally:
        path.write_bytes(original)
