"""Runs the tests of this folder on every rank of an ``mpirun``; rank 0 prints, and the first failure ends all ranks.

    mpirun -n 4 python -m tests.mpi.run [options of pytest]    # the tests for four ranks
    mpirun -n 8 python -m tests.mpi.run --all [options]        # one suite after the other, on 8, 4, 2 and 1 ranks
    mpirun -n 8 python -m tests.mpi.run --long [options]       # the long tests, on 8, 6, 4 and 3 ranks

Starting a rank takes as long as many tests. So with ``--all`` and ``--long`` the first ranks of eight run the suites of
fewer ranks, too, while the others wait, and references that one rank has trained serve all suites. At the end of
``--all`` the ranks leave with parameters in flight (see ``leave_early.py``).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict

import pytest
import torch

from fugaku_gpt.comm import Communicator, communicator, open_world
from tests.mpi.leave_early import train_and_leave
from tests.mpi.suites import LEAVING, LONG_SUITES, SUITES, heading

FOLDER = Path(__file__).parent
_PAUSE_SECONDS = 0.05


class OnRanks:
    """The communicator of the tests. Prints a failed test and aborts all ranks, which would else wait in a collective
    for the rank that failed."""

    def __init__(self, world: Communicator) -> None:
        self._world = world

    @pytest.fixture(scope="session")
    def world(self) -> Communicator:
        """The communicator of all ranks of this suite."""
        return self._world

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            message = f"{report.nodeid}\n{report.longreprtext}\n{report.capstderr}"
            print(f"rank {self._world.rank}: {message}", file=sys.stderr, flush=True)
            self._world.abort(1)


def run_suite(world: Communicator, tests: str, *options: str) -> int:
    """Runs pytest on this rank; returns its exit code."""
    os.environ["FUGAKU_GPT_TEST_RANKS"] = str(world.size)
    # without the plug-in that collects garbage several times at the end: every rank would, and they are many
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:logging", "-W", "ignore"]
    print(heading(world.size), flush=True)
    # a folder of each rank's own: pytest would remove old ones of all, and warn of those that another rank removes
    with tempfile.TemporaryDirectory(prefix="fugaku_gpt-rank-") as folder:
        arguments += ["--basetemp", f"{folder}/tests"]
        return int(pytest.main([*arguments, str(FOLDER / tests), *options], plugins=[OnRanks(world)]))


def run_all(everyone: Communicator, suites: Dict[int, str], *options: str) -> int:
    """Runs suites, one after the other; returns the first exit code of pytest that is not 0."""
    for ranks, tests in suites.items():
        world = everyone.split(0 if everyone.rank < ranks else None, everyone.rank, "world")
        code = run_suite(world, tests, *options) if everyone.rank < ranks else 0
        if code != 0:
            everyone.abort(1)  # the other ranks wait
            return code
        waiting = everyone.start_all_reduce(torch.zeros(1))
        while not waiting.done():
            time.sleep(_PAUSE_SECONDS)  # for minutes: polling as often as within a step would cost the others time
    return 0


def leave(everyone: Communicator) -> None:
    """Trains on both halves of the ranks, which leave with parameters in flight."""
    if everyone.rank == 0:
        print(LEAVING, file=sys.stderr, flush=True)
    half = everyone.size // 2
    train_and_leave(everyone.split(everyone.rank // half, everyone.rank, "world"), by_nodes=everyone.rank >= half)


def main() -> int:
    """Runs the suite for the number of ranks, all suites or the long ones; returns the exit code."""
    torch.set_num_threads(1)  # there are more ranks than cores here
    # of four ranks that share a core, one that looks often whether a message is there takes time from its sender
    communicator._FIRST_PAUSE_SECONDS, communicator._LONGEST_PAUSE_SECONDS = 5e-4, 2e-3
    world, options = open_world(), sys.argv[1:]
    if world.rank != 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    which, *others = options or [""]
    if which not in ("--all", "--long"):
        return run_suite(world, {**LONG_SUITES, **SUITES}.get(world.size, ""), *options)
    if world.size != max(SUITES):
        sys.exit(f"{which} takes {max(SUITES)} ranks, not {world.size}")
    if which == "--long":
        return run_all(world, LONG_SUITES, "-m", "long", *others)
    code = run_all(world, SUITES, "-m", "not long", *others)
    if code == 0:
        leave(world)
    return code


if __name__ == "__main__":
    sys.exit(main())
