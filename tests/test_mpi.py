"""Starts the tests of ``tests/mpi`` under a real ``mpirun``: one start of eight ranks runs those of fewer, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Dict, List

import pytest

from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.processes import run_command
from tests.mpi.cases import NARROW, WIDE, config_of, is_long
from tests.mpi.suites import LEAVING, LONG_SUITES, SUITES, heading

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

ROOT = Path(__file__).resolve().parent.parent
TYPES = ("float64", "float32")  # of wide cases
SOAKED = "{count} random layouts on {ranks} ranks: none hung, every curve is one rank's"
TIMEOUT_SECONDS = 2700  # an honest run takes under six minutes on two free cores; past this it hangs


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_rank_passes_the_mpi_tests_and_may_leave_with_parameters_in_flight() -> None:
    output = _mpirun(max(SUITES), "-m", "tests.mpi.run", "--all", "-rP")
    for ranks, suite_output in _outputs_of_suites(output, SUITES).items():
        _check_suite(ranks, suite_output)
    left = re.findall(r"^4 ranks leave; node first: (\w+); on their way: (\d+) buckets$", output, re.MULTILINE)
    assert sorted(node_first for node_first, _ in left) == ["False", "True"] and all(int(n) > 0 for _, n in left), (
        output
    )
    assert LEAVING in output and "Error" not in output.partition(LEAVING)[2], output


@pytest.mark.long
def test_more_random_layouts_do_not_hang_and_more_cases_train_alike() -> None:
    output = _mpirun(max(LONG_SUITES), "-m", "tests.mpi.run", "--long", "-rP")
    for ranks, suite_output in _outputs_of_suites(output, LONG_SUITES).items():
        assert (SOAKED.format(count=5, ranks=ranks) in suite_output) == (ranks in (3, 6, 8)), output
        if ranks in SUITES:
            _check_comparisons(ranks, suite_output, are_long=True)


def _outputs_of_suites(output: str, suites: Dict[int, str]) -> Dict[int, str]:
    headings = [heading(ranks) for ranks in suites]
    assert [line for line in output.splitlines() if line in headings] == headings, output
    return {ranks: output.partition(heading(ranks) + "\n")[2].partition("=== suite")[0] for ranks in suites}


def _check_suite(ranks: int, output: str) -> None:
    _check_comparisons(ranks, output, are_long=False)
    assert (SOAKED.format(count=2, ranks=ranks) in output) == (ranks == 8), output
    passed = re.search(r"^.*?(\d+) passed.*$", output, re.MULTILINE)  # MPI may print more after it
    assert passed and int(passed[1]) > 0, output
    print(f"{ranks} ranks: {passed[0]}")


def _check_comparisons(ranks: int, output: str, are_long: bool) -> None:
    """Every case of this number of ranks has been compared with a single rank, in each type."""
    compared = re.findall(r"^parity (.*), (float\d+): loss", output, re.MULTILINE)
    compared += re.findall(r"^16 bits (.*), beside (float32): loss", output, re.MULTILINE)
    cases = [(case or "one rank", dtype) for case in WIDE for dtype in TYPES if is_long(case, dtype) == are_long]
    cases += [(case, "float32") for case in NARROW if is_long(case, config_of(case).training.dtype) == are_long]
    expected = [(case, dtype) for case, dtype in cases if config_of(case.replace("one rank", "")).layout.ranks == ranks]
    assert expected and sorted(compared) == sorted(expected), output


def _mpirun(ranks: int, *arguments: str) -> str:
    launcher = find_launcher()
    command = [*launcher.command_prefix(ranks), sys.executable, *arguments]
    environment = {**launcher.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    lines: List[str] = []
    outcome = run_command(command, environment, timeout=TIMEOUT_SECONDS, on_line=lines.append)  # leaves no rank behind
    output = "\n".join([*lines, ""])
    assert outcome.ok, f"{outcome}\n{output}"
    return output
