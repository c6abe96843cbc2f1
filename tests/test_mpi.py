"""Starts the tests of ``tests/mpi`` under a real ``mpirun``, once for each number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_gpt.launch.launcher import find_launcher
from tests.mpi.cases import NARROW, WIDE, config_of

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parent.parent
SOAKED = "none hung, every curve is one rank's"
TIMEOUT_SECONDS = 1800  # an honest run takes under four minutes on two free cores; past this it hangs


@pytest.mark.parametrize("ranks", [8, 4, 2, 1])
def test_every_rank_passes_the_mpi_tests(ranks: int) -> None:
    output = _mpirun(ranks, "-m", "tests.mpi.run", "-rP")
    wide, narrow = (sum(config_of(case).layout.ranks == ranks for case in cases) for cases in (WIDE, NARROW))
    assert len(re.findall(r"^parity .*, float(?:32|64): loss", output, re.MULTILINE)) == 2 * wide > 0, output
    assert len(re.findall(r"^16 bits .*, beside float32: loss", output, re.MULTILINE)) == narrow > 0, output
    assert (f"5 random layouts on 8 ranks: {SOAKED}" in output) == (ranks == 8), output
    passed = re.search(r"^.*?(\d+) passed.*$", output, re.MULTILINE)  # MPI may print more after it
    assert passed and int(passed[1]) > 0, output
    print(f"{ranks} ranks: {passed[0]}")


@pytest.mark.parametrize("ranks", [3, 6])  # on 8 ranks: tests/mpi/test_soak.py
def test_random_layouts_with_random_delays_do_not_hang(ranks: int) -> None:
    output = _mpirun(ranks, "-m", "tests.mpi.soak", "--layouts", "5", "--seed", str(ranks))
    assert f"5 random layouts on {ranks} ranks: {SOAKED}" in output


def _mpirun(ranks: int, *arguments: str) -> str:
    launcher = find_launcher()
    command = [*launcher.command_prefix(ranks), sys.executable, *arguments]
    environment = {**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        timeout=TIMEOUT_SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    output = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, output
    return output


@pytest.mark.parametrize("sums", ["flat", "node-first"])
def test_ranks_may_leave_with_parameters_in_flight(sums: str) -> None:
    output = _mpirun(4, "-m", "tests.mpi.leave_early", sums)
    assert f"4 ranks leave; node first: {sums == 'node-first'}; on their way: " in output
    assert "on their way: 0" not in output and "Error" not in output, output
