"""Tests of communicators in one process, and of the records of a rank that was killed inside a real collective."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import List

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.records.flight import FORWARD, flight_file, read_flight
from tests.comm.killed_rank import OUTLIVED

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "comm" / "killed_rank.py"


def _line_of(text: str) -> int:
    (number,) = [n for n, line in enumerate(PROGRAM.read_text(encoding="utf-8").splitlines(), 1) if text in line]
    return number


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_rank_killed_inside_a_collective_leaves_the_open_call_and_the_calling_line(tmp_path: Path) -> None:
    launcher = find_launcher()
    done = subprocess.run(
        [*launcher.command_prefix(2), sys.executable, "-m", "tests.comm.killed_rank", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    output = done.stdout.decode()
    assert done.returncode != 0 and "AssertionError" not in output and OUTLIVED not in output, output
    killed, witness = (read_flight(flight_file(tmp_path, rank)) for rank in (0, 1))
    assert (killed.rank, witness.rank, killed.head.ranks) == (0, 1, 2)
    barrier, last = killed.calls  # and none of the refused calls
    assert (barrier.operation, barrier.dtype, barrier.shape) == ("barrier", "-", ())
    assert barrier.site == f"comm/killed_rank.py:{_line_of('world.barrier()')}" and barrier.left >= barrier.entered
    assert (last.communicator, last.operation, last.dtype, last.shape) == (
        "world",
        "all_reduce_max",
        "torch.float32",
        (3, 2),
    )
    assert last.site == f"comm/killed_rank.py:{_line_of('waits for ever')}" and last.left == 0.0
    assert [call.operation for call in witness.calls] == ["barrier"]


def test_a_single_process_world_records_progress_and_no_calls(tmp_path: Path) -> None:
    world = open_world(tmp_path)
    assert (world.rank, world.size, world.name) == (0, 1, "world")
    world.all_reduce(torch.ones(2))
    world.barrier()
    world.mark_phase(FORWARD, 3, 1)
    flight = read_flight(flight_file(tmp_path, 0))
    assert flight.calls == [] and (flight.head.step, flight.head.micro_batch, flight.head.phase) == (3, 1, FORWARD)


@pytest.mark.parametrize("operation", ["sum", "max", "min"])
def test_all_reduce_in_a_single_process_leaves_the_tensor_unchanged(operation: str) -> None:
    tensor = torch.arange(4.0)
    Communicator.alone().all_reduce(tensor, operation)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_all_gather_in_a_single_process_is_a_view_and_makes_no_copy() -> None:
    tensor = torch.arange(4.0)
    assert Communicator.alone().all_gather(tensor).data_ptr() == tensor.data_ptr()


def test_the_grid_of_a_single_process_has_groups_of_size_1() -> None:
    grid = ProcessGrid.alone()
    assert (grid.coordinates.dp, grid.coordinates.pp, grid.coordinates.tp) == (0, 0, 0)
    assert grid.world.size == grid.tp.size == grid.dp.size == 1
    with pytest.raises(ValueError, match="a layout of 2 ranks was given 1 ranks"):
        ProcessGrid(Communicator.alone(), LayoutConfig(dp=2))


@pytest.mark.parametrize("seconds", [0.0, 1e-4, 1e-3, 5e-3, 0.2])
def test_ranks_that_share_cores_sleep_little_longer_than_they_have_to_wait(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: List[float] = []

    class Request:
        def Test(self) -> bool:
            return sum(slept) >= seconds

    monkeypatch.setattr(time, "sleep", slept.append)
    group = Communicator(None, "a group", shares_cores=True)
    group._wait(Request())
    overslept_seconds = sum(slept) - seconds
    assert 0.0 <= overslept_seconds <= min(1e-3, 2e-5 + seconds / 8) + 1e-12
    assert max(slept, default=0.0) <= 1e-3 and len(slept) <= 60 + seconds / 1e-3  # ranks that compute keep their cores
