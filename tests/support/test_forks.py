"""Tests of the process that tests fork ranks from: signals and exit codes are passed on, and it starts anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forks import ForkedPython

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> ForkedPython:
    return ForkedPython(tmp_path_factory.mktemp("forks") / "few", Path(sys.executable))


def run(python: ForkedPython, program: str) -> "subprocess.CompletedProcess[str]":
    with python.connect():
        return subprocess.run(
            [str(python.program), "-c", program, "x"], stdout=subprocess.PIPE, encoding="utf-8", check=False
        )


def test_a_fork_has_pytorch_and_ends_like_a_plain_process(python: ForkedPython) -> None:
    ended = run(python, "import sys; print('torch' in sys.modules, sys.argv[1:]); sys.exit(7)")
    assert (ended.stdout, ended.returncode) == ("True ['x']\n", 7)
    assert run(python, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)").returncode == -signal.SIGTERM


def test_the_process_starts_anew_after_the_last_worker(python: ForkedPython) -> None:
    parents = []
    for _ in range(2):
        parents.append(int(run(python, "import os; print(os.getppid())").stdout))
        deadline = time.monotonic() + 60.0  # for a test that fails
        while _is_running(parents[-1]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert parents[0] != parents[1]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
