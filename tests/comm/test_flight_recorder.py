"""The flight recorder, written by one process and read by another, also after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fugaku_gpt.comm import Communicator, FlightRecorder
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.flight import NAMES, SLOTS, flight_file, read_flight

KILLED = """
import os, signal, sys
from pathlib import Path
from fugaku_gpt.comm.flight_recorder import FlightRecorder
recorder = FlightRecorder(Path(sys.argv[1]), 3, 8)

def call(operation, leaves):
    def communicator_method():
        def enter():
            return recorder.enter("tp", operation, "torch.float32", (4, 5))
        slot = enter()
        if leaves:
            recorder.leave(slot)
    communicator_method()

call("all_reduce_sum", True)
call("barrier", False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_is_seen_inside_its_last_call(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    flight = read_flight(flight_file(tmp_path, 3))
    assert (flight.rank, flight.ranks) == (3, 8)
    first, last = flight.calls
    assert (first.sequence, first.operation, first.shape) == (
        1,
        "all_reduce_sum",
        (4, 5),
    ) and first.left >= first.entered
    assert (last.sequence, last.operation, last.communicator, last.left) == (2, "barrier", "tp", 0.0)
    assert last.site.startswith("<string>:")


def test_the_ring_keeps_the_last_calls_in_order(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 1)
    for number in range(3 * SLOTS + 7):
        recorder.leave(recorder.enter("dp", "all_reduce_sum", "-", (number,)))
    calls = read_flight(flight_file(tmp_path, 0)).calls
    assert [call.shape[0] for call in calls] == list(range(2 * SLOTS + 7, 3 * SLOTS + 7))


def test_more_names_than_there_is_room_for_are_question_marks(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 1)
    for number in range(NAMES + 10):
        recorder.enter(f"communicator {number}", "x" * 300, "-", ())
    last = read_flight(flight_file(tmp_path, 0)).calls[-1]
    assert last.communicator == "?" and last.operation == "x" * 96 and last.shape == ()


@pytest.mark.parametrize("damage", [b"", b"FGFLIGHT", b"something else entirely" * 10])
def test_what_is_no_flight_recorder_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x.flight").write_bytes(damage)
    with pytest.raises(UsageError, match="x.flight: not a flight recorder"):
        read_flight(tmp_path / "x.flight")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    FlightRecorder(tmp_path, 0, 1)
    path = flight_file(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match="cut short"):
        read_flight(path)


def test_a_group_of_one_needs_no_mpi_and_changes_nothing() -> None:
    alone = Communicator.alone()
    x = torch.arange(6.0).view(2, 3).t()  # with gaps: nothing is sent, so nothing is refused
    alone.all_reduce(x)
    alone.broadcast(x)
    alone.barrier()
    assert torch.equal(x, torch.arange(6.0).view(2, 3).t())
    assert alone.all_gather(x).shape == (1, 3, 2)
    assert alone.gather_json({"a": 1}) == [{"a": 1}] and alone.broadcast_json([2]) == [2]
    assert (alone.rank, alone.size) == (0, 1) and alone.split(0, 0, "tp").size == 1
