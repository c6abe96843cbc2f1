"""Tests of which runs the watchdog takes for hanging, on a simulated clock, and that it ends the process."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Iterable, Iterator, List

import pytest

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.comm import Communicator, FlightRecorder, ProcessGrid
from fugaku_gpt.records.flight import BACKWARD, CHECKPOINT, FORWARD, START_UP, SUMS, VALIDATION, flight_file
from fugaku_gpt.records.run import FAILED, HUNG, Result, RunDirectory
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.resume import load_checkpoint
from fugaku_gpt.training.trainer import Trainer
from fugaku_gpt.training.watchdog import Watchdog
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

TIMEOUT = 60.0  # seconds of the simulated clock
TICK = 3.0


class Ended(Exception):
    """A watchdog has ended its process."""


class Clock:
    """Stand-in for :mod:`time`, in the modules that distinguish a hang from a slow run."""

    def __init__(self) -> None:
        self.current_time = time.time()

    def time(self) -> float:
        return self.current_time

    def monotonic(self) -> float:
        return self.current_time

    def sleep(self, seconds: float) -> None:
        self.current_time += seconds


class Ranks:
    """Ranks of one run and their watchdogs, each of which checks only when a test lets it."""

    def __init__(self, clock: Clock, directory: RunDirectory, count: int) -> None:
        self.clock = clock
        self.directory = directory
        self.recorders = [FlightRecorder(directory.flight_dir, rank, count) for rank in range(count)]
        self.dogs = [Watchdog(recorder, directory, TIMEOUT, clock.current_time) for recorder in self.recorders]
        self.progress(range(count), FORWARD)

    def progress(self, ranks: Iterable[int], phase: int) -> None:
        for rank in ranks:
            self.recorders[rank].mark_phase(phase, 3, 0)

    def pass_time(self, seconds: float, ranks: Iterable[int] = (0,)) -> None:
        """Let time pass, in which the watchdogs of these ranks check at every tick."""
        checking = list(ranks)
        for _ in range(round(seconds / TICK)):
            self.clock.current_time += TICK
            for rank in checking:
                self.dogs[rank].check()

    def examiners(self) -> List[int]:
        return [rank for rank, dog in enumerate(self.dogs) if dog._is_examining]

    def assert_ends_within(self, seconds: float, ranks: Iterable[int] = (0,)) -> None:
        with pytest.raises(Ended):
            self.pass_time(seconds, ranks)
        assert (self.directory.stacks_dir / "hung.json").exists()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, utime = Clock(), os.utime

    def end(_code: int) -> None:
        raise Ended

    for module in ("training.watchdog", "comm.flight_recorder"):
        monkeypatch.setattr(f"fugaku_gpt.{module}.time", clock)
    monkeypatch.setattr("os.utime", lambda path: utime(path, (clock.current_time, clock.current_time)))
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(FlightRecorder, "sync", lambda recorder: None)  # for other nodes, and slow on a busy disk
    yield clock
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def start(clock: Clock, tmp_path: Path) -> Callable[[int], Ranks]:
    return lambda count: Ranks(clock, RunDirectory(tmp_path), count)


def test_a_run_without_progress_on_any_rank_is_ended_and_recorded(start: Callable[[int], Ranks]) -> None:
    ranks = start(2)
    ranks.pass_time(TIMEOUT - 2 * TICK)
    ranks.assert_ends_within(4 * TICK)
    result = ranks.directory.result()
    assert result is not None and result.status == HUNG and result.reason
    assert (ranks.directory.stacks_dir / "rank-000000.txt").read_text(encoding="utf-8").count("test_watchdog.py")
    with pytest.raises(Ended):  # the other rank sees it at its next check, and writes its stacks too
        ranks.pass_time(TIMEOUT, (1,))
    assert (ranks.directory.stacks_dir / "rank-000001.txt").exists()


@pytest.mark.parametrize("mover", [0, 1])
def test_a_run_is_slow_and_not_hung_while_any_rank_makes_progress(start: Callable[[int], Ranks], mover: int) -> None:
    ranks = start(2)
    for _ in range(12):
        ranks.pass_time(TIMEOUT * 0.8, (0, 1))
        ranks.progress((mover,), BACKWARD)
    assert ranks.directory.result() is None
    ranks.assert_ends_within(2 * TIMEOUT, (0, 1))


def test_time_in_which_the_process_was_suspended_does_not_count(start: Callable[[int], Ranks]) -> None:
    ranks = start(1)
    for _ in range(4):
        ranks.pass_time(TIMEOUT / 5)
        ranks.clock.current_time += 20 * TIMEOUT
    ranks.assert_ends_within(TIMEOUT)


@pytest.mark.parametrize("phase", [START_UP, CHECKPOINT])
@pytest.mark.parametrize("where", ["this rank", "another"])
def test_files_may_take_longer_than_steps(start: Callable[[int], Ranks], phase: int, where: str) -> None:
    ranks = start(2)
    ranks.progress((0,), phase if where == "this rank" else SUMS)
    ranks.progress((1,), phase)
    ranks.pass_time(4.5 * TIMEOUT, (0, 1))
    assert ranks.directory.result() is None
    ranks.assert_ends_within(2 * TIMEOUT, (0, 1))


@pytest.mark.parametrize("phase", [FORWARD, SUMS, VALIDATION])
def test_other_phases_may_not_exceed_the_timeout(start: Callable[[int], Ranks], phase: int) -> None:
    ranks = start(1)
    ranks.progress((0,), phase)
    ranks.assert_ends_within(TIMEOUT + 2 * TICK)


def test_a_single_rank_examines_for_all_and_another_takes_over_if_it_falls_silent(
    start: Callable[[int], Ranks],
) -> None:
    ranks = start(3)
    ranks.pass_time(TIMEOUT * 0.7, (1, 0, 2))
    assert ranks.examiners() == [1]
    ranks.progress((1,), BACKWARD)  # it makes progress, and leaves the claim to others
    ranks.pass_time(2 * TICK, (1, 0, 2))
    assert ranks.examiners() == [0]
    ranks.progress((0, 1, 2), SUMS)
    ranks.pass_time(TICK, (0, 1, 2))
    assert ranks.examiners() == []
    ranks.pass_time(TIMEOUT * 0.7, (2, 0))
    assert ranks.examiners() == [2]
    ranks.assert_ends_within(2 * TIMEOUT, (0,))  # as if rank 2 were stopped now


def test_an_earlier_result_is_not_overwritten(start: Callable[[int], Ranks]) -> None:
    ranks = start(1)
    ranks.directory.write_result(Result(FAILED, "a rank ran out of memory", 0.0, 1.0, 2), replace=False)
    ranks.assert_ends_within(2 * TIMEOUT)
    result = ranks.directory.result()
    assert result is not None and (result.status, result.reason) == (FAILED, "a rank ran out of memory")


def test_a_hang_of_an_earlier_run_in_the_same_folder_ends_nothing(start: Callable[[int], Ranks]) -> None:
    start(1).assert_ends_within(2 * TIMEOUT)
    again = start(1)
    for _ in range(3):
        again.pass_time(TIMEOUT * 0.8)
        again.progress((0,), FORWARD)
    again.assert_ends_within(2 * TIMEOUT)


@pytest.mark.parametrize("text", ["[]", "{}", '{"time": "now"}', "3", "{"])
def test_a_damaged_mark_of_a_hang_ends_nothing(start: Callable[[int], Ranks], text: str) -> None:
    ranks = start(1)
    ranks.directory.stacks_dir.mkdir(exist_ok=True)
    (ranks.directory.stacks_dir / "hung.json").write_text(text, encoding="utf-8")
    for _ in range(3):
        ranks.pass_time(TIMEOUT * 0.8)
        ranks.progress((0,), FORWARD)
    ranks.assert_ends_within(2 * TIMEOUT)


@pytest.mark.parametrize("wait", [True, False], ids=["synchronous", "waited for later"])
def test_a_slow_disk_is_no_hang_while_pieces_of_a_checkpoint_are_written_or_read(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    directory = RunDirectory(tmp_path)
    recorder = FlightRecorder(directory.flight_dir, 0, 1)
    dog = Watchdog(recorder, directory, TIMEOUT, clock.current_time)
    config = tiny_config()
    world = Communicator(None, "world", recorder)
    grid = ProcessGrid(world, config.layout)
    run = Trainer(config, grid, ByteSamples(config.model.seq_len))
    checkpoints = CheckpointSaver(run, directory.checkpoints_dir)
    monkeypatch.setattr("fugaku_gpt.training.checkpoint._POLL_SECONDS", 0.001)
    accesses: List[int] = []  # the heartbeat at each
    finishes = threading.Event()

    def slow(original: Callable[..., int], beside: bool) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            if beside:
                assert finishes.wait(30.0)
            deadline = time.monotonic() + 5.0
            while beside and len(accesses) > 1 and recorder.beats == accesses[-1] and time.monotonic() < deadline:
                time.sleep(0.001)  # until the rank, which waits for this thread, has polled again
            accesses.append(recorder.beats)
            for _ in range(round(1.5 * TIMEOUT / TICK)):
                clock.current_time += TICK
                dog.check()
            return original(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(file_system, "write_at", slow(file_system.write_at, beside=not wait))
        checkpoints.save({}, wait=wait)
        finishes.set()
        checkpoints.finish()
    assert len(accesses) > 20  # each took longer than the timeout
    path = list_checkpoints(directory.checkpoints_dir)[0].path
    accesses.clear()
    with monkeypatch.context() as patch:
        patch.setattr(file_system, "read_at", slow(file_system.read_at, beside=False))
        assert load_checkpoint(run, path, read_manifest(path)) is None
    assert len(accesses) > 20 and directory.result() is None


HANGS = """
import sys, time
from pathlib import Path
from fugaku_gpt.comm import FlightRecorder
from fugaku_gpt.records.flight import FORWARD
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.watchdog import Watchdog
directory = RunDirectory(Path(sys.argv[1]))
recorder = FlightRecorder(directory.flight_dir, 0, 1)
recorder.mark_phase(FORWARD, 3, 0)
Watchdog(recorder, directory, 0.5, time.time()).start()
time.sleep(120)
"""


def test_a_damaged_file_does_not_keep_a_hanging_rank_alive(tmp_path: Path) -> None:
    damaged = flight_file(tmp_path / "flight", 7)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a recorder's")
    done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, timeout=90, check=False)
    result = RunDirectory(tmp_path).result()
    assert done.returncode == 1 and result is not None and result.status == HUNG, done
    assert "rank-000007.flight: not a flight recorder file" in result.reason
    assert (tmp_path / "stacks" / "rank-000000.txt").exists()
