"""Tests of the flight recorder, which one process writes and another reads, also after a kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fugaku_gpt.comm import Communicator, FlightRecorder
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.records.flight import (
    BACKWARD,
    ENTERED,
    NAMES,
    PINNED,
    POSTED,
    RETURNED,
    SLOTS,
    WAITING,
    flight_file,
    progressions,
    read_flight,
    read_head,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from fugaku_gpt.comm.flight_recorder import FlightRecorder
recorder = FlightRecorder(Path(sys.argv[1]), 3, 8)
tp = recorder.group("tp", (2, 3), 1)

def call(operation, leaves):
    slot = recorder.enter(tp, operation, "torch.float32", (4, 5), True)
    if leaves:
        recorder.leave(slot)

call("all_reduce_sum", True)
call("barrier", False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_call_of_a_killed_process_is_recorded_as_open(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    flight = read_flight(flight_file(tmp_path, 3))
    assert (flight.rank, flight.head.ranks) == (3, 8)
    first, last = flight.calls
    assert (first.sequence, first.operation, first.shape) == (
        1,
        "all_reduce_sum",
        (4, 5),
    ) and first.left >= first.entered
    assert (last.sequence, last.operation, last.communicator, last.left) == (2, "barrier", "tp", 0.0)
    assert last.site.startswith("<string>:")


def test_the_last_calls_are_read_in_order_with_the_rank_s_progress(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 1001, 2000)
    tp = recorder.group("tp", range(1000, 1008), 1)
    recorder.mark_phase(BACKWARD, step=7, micro_batch=3)
    for _ in range(SLOTS + 100):
        recorder.leave(recorder.enter(tp, "all_reduce_sum", "torch.float32", (4, 8), True))
    assert recorder.path == tmp_path / "001" / "rank-001001.flight"
    flight = read_flight(recorder.path)
    head = flight.head
    assert (head.rank, head.ranks, head.process, head.step, head.micro_batch) == (1001, 2000, os.getpid(), 7, 3)
    assert head.phase == BACKWARD and head.heartbeat == recorder.beats and head.progressed >= head.started
    assert read_head(recorder.path) == head
    assert [call.ordinal for call in flight.calls] == list(range(101, SLOTS + 101))
    call = flight.calls[-1]
    assert (call.communicator, call.operation, call.dtype, call.shape) == (
        "tp",
        "all_reduce_sum",
        "torch.float32",
        (4, 8),
    )
    assert (call.sequence, call.step, call.micro_batch, call.phase) == (SLOTS + 100, 7, 3, BACKWARD)
    assert call.site.startswith("comm/test_flight_recorder.py:") and call.wait_site == call.site
    assert call.state == RETURNED and call.left >= call.entered > 0
    assert flight.waiting is None and flight.outstanding == []
    assert flight.groups[0].members == tuple(range(1000, 1008)) and flight.groups[0].collectives == SLOTS + 100


def test_a_call_passes_through_all_states_and_only_the_awaited_call_is_waiting(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 4)
    pp = recorder.group("pp", (0, 2), 0)
    sent = recorder.enter(pp, SEND, "torch.float32", (8,), False, peer=2)
    awaited = recorder.enter(pp, RECEIVE, "torch.float32", (8,), False, peer=2)
    assert [call.state for call in read_flight(recorder.path).outstanding] == [ENTERED, ENTERED]
    recorder.posted(sent)
    recorder.posted(awaited)
    assert read_flight(recorder.path).waiting is None  # posted, and the rank continues its work
    recorder.wait(awaited)
    flight = read_flight(recorder.path)
    assert [call.state for call in flight.outstanding] == [POSTED, WAITING]
    assert flight.waiting is not None and (flight.waiting.operation, flight.waiting.peer) == (RECEIVE, 2)
    assert flight.messages(pp, 2, SEND) == flight.messages(pp, 2, RECEIVE) == 1 and flight.messages(pp, 3, SEND) == 0
    recorder.leave(awaited)
    assert [call.operation for call in read_flight(recorder.path).outstanding] == [SEND]


def test_outstanding_calls_outlive_the_ring_and_their_end_marks_no_other_record(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 2)
    world = recorder.group("world", (0, 1), 0)
    outstanding = [recorder.enter(world, "all_reduce_sum", "-", (), False) for _ in range(3 * PINNED)]
    for _ in range(2 * SLOTS):
        recorder.leave(recorder.enter(world, "barrier", "-", (), True))
    assert [call.ordinal for call in read_flight(recorder.path).outstanding] == outstanding
    for ordinal in outstanding[::2]:
        recorder.leave(ordinal)
    flight = read_flight(recorder.path)
    assert [call.ordinal for call in flight.outstanding] == outstanding[1::2]
    assert len(flight.calls) == SLOTS + 3 * PINNED
    recorder.leave(outstanding[0])  # a second time: the record belongs to another call by now
    assert [call.ordinal for call in read_flight(recorder.path).outstanding] == outstanding[1::2]


def test_a_disk_that_fills_up_cannot_kill_the_rank(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 2)
    world = recorder.group("world", (0, 1), 0)
    for count in (0, 2 * PINNED + SLOTS):  # the file grows with the calls that are outstanding
        for _ in range(count):
            recorder.enter(world, "all_reduce_sum", "-", (), False)
        file = os.stat(recorder.path)
        assert file.st_blocks * 512 >= file.st_size  # writing to a map that has no room on the disk is SIGBUS


def test_a_disk_without_room_for_the_record_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device: .*rank-000000.flight"):
        FlightRecorder(tmp_path, 0, 1)


def test_equal_sequence_numbers_are_the_same_call(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 4)
    groups = [recorder.group(name, (0, 1), 0) for name in ("tp", "dp", "dp")]
    for group in [groups[index] for index in (0, 1, 0, 2, 0, 1)]:
        recorder.leave(recorder.enter(group, "barrier", "-", (), True))
    for peer in (1, 3, 1):
        recorder.leave(recorder.enter(0, SEND, "-", (), False, peer=peer))
    flight = read_flight(recorder.path)
    assert [call.sequence for call in flight.calls] == [1, 1, 2, 1, 3, 2, 1, 1, 2]
    assert [(group.name, group.number, group.collectives) for group in flight.groups] == [
        ("tp", 0, 3),
        ("dp", 0, 2),
        ("dp", 1, 1),
    ]


def test_members_of_a_grid_are_written_as_progressions_and_irregular_members_fit_too(tmp_path: Path) -> None:
    assert progressions(range(0, 13824, 48)) == "0+48*288" and progressions([5]) == "5+1*1"
    assert progressions([0, 1, 4, 9, 10, 11]) == "0+1*2,4+5*2,10+1*2"
    recorder = FlightRecorder(tmp_path, 0, 20000)
    uneven = [rank * rank for rank in range(100)]
    recorder.group("node", uneven, 0)
    recorder.group("tp", (0, 1), 0)
    flight = read_flight(recorder.path)
    assert flight.groups[0].members == tuple(uneven) and flight.groups[1].members == (0, 1)


def test_names_beyond_the_capacity_are_question_marks(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 1)
    for number in range(NAMES + 10):
        group = recorder.group(f"communicator {number}", (0,), 0)
        recorder.enter(group, f"{number} " + "x" * 300, "-", (), True)
    flight = read_flight(flight_file(tmp_path, 0))
    last = flight.calls[-1]
    assert (last.communicator, last.operation, last.shape) == ("?", "?", ())
    assert flight.groups[2].name == "communicator 2" and flight.groups[2].members == (0,)


@pytest.mark.parametrize("damage", [b"", b"FGFLIGHT", b"something else entirely" * 10])
def test_a_file_that_is_no_flight_recorder_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x.flight").write_bytes(damage)
    with pytest.raises(UsageError, match="x.flight: not a flight recorder"):
        read_flight(tmp_path / "x.flight")


def test_a_file_that_is_cut_short_of_another_version_or_missing_is_refused(tmp_path: Path) -> None:
    FlightRecorder(tmp_path, 0, 1)
    path = flight_file(tmp_path, 0)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UsageError, match="cut short"):
        read_flight(path)
    path.write_bytes(content[:8] + b"\x01" + content[9:])
    with pytest.raises(UsageError, match="of version 1; this build reads 2"):
        read_flight(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_flight(tmp_path / "none")


def test_a_single_rank_group_needs_no_mpi_and_changes_nothing() -> None:
    alone = Communicator.alone()
    x = torch.arange(6.0).view(2, 3).t()  # with gaps: nothing is sent, so nothing is refused
    alone.all_reduce(x)
    alone.broadcast(x)
    alone.barrier()
    assert torch.equal(x, torch.arange(6.0).view(2, 3).t())
    assert alone.all_gather(x).shape == (1, 3, 2)
    assert alone.gather_json({"a": 1}) == [{"a": 1}] and alone.broadcast_json([2]) == [2]
    assert (alone.rank, alone.size) == (0, 1) and alone.split(0, 0, "tp").size == 1
