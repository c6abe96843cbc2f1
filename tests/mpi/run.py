"""Runs the tests of this folder on every rank of an ``mpirun``; rank 0 prints, and the first failure ends all ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from fugaku_gpt.comm import Communicator, open_world


class EndAllRanks:
    """Prints a failed test and aborts all ranks, which would else wait in a collective for the rank that failed."""

    def __init__(self, world: Communicator) -> None:
        self._world = world

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            message = f"{report.nodeid}\n{report.longreprtext}\n{report.capstderr}"
            print(f"rank {self._world.rank}: {message}", file=sys.stderr, flush=True)
            self._world.abort(1)


def main() -> int:
    """Runs pytest on this rank; returns its exit code."""
    torch.set_num_threads(1)  # there are more ranks than cores here
    world = open_world()
    os.environ["FUGAKU_GPT_TEST_RANKS"] = str(world.size)
    if world.rank != 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # without the plug-in that collects garbage several times at the end: every rank would, and they are many
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:logging", "-W", "ignore"]
    options += [str(Path(__file__).parent), *sys.argv[1:]]
    return int(pytest.main(options, plugins=[EndAllRanks(world)]))


if __name__ == "__main__":
    sys.exit(main())
