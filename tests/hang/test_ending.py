"""Tests that no rank is accused without evidence: a result, a process that is gone, or a long standstill."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Optional, Tuple

import pytest

from fugaku_gpt.hang.diagnosis import NO_HANG, Hang, read_flights
from fugaku_gpt.hang.ending import FROM_OUTSIDE, PAUSED, UNDECIDED, Observed, explain_end
from fugaku_gpt.hang.standstill import longest_pause, measure_standstill
from fugaku_gpt.records.flight import CHECKPOINT, FINISHED, FORWARD, START_UP, WATCH_OFFSET
from fugaku_gpt.records.run import FAILED, HUNG, INTERRUPTED, OK, OUT_OF_MEMORY, TIMEOUT, Result
from tests.doctor.flights import Ranks

PAIR = {"world": [(0, 1)]}


def killed_run(folder: Path, seconds: float, is_watched: bool = True, phase: int = FORWARD) -> Ranks:
    """Two ranks whose processes are gone; rank 0 waited for rank 1 for some seconds."""
    ranks = Ranks(folder, 2, PAIR)
    ranks.progress((0, 1), phase, 7, 1)
    ranks.call((0,), "world", "agree.py:9", shape=(6,), returns=False)
    ranks.all_end()
    ranks.stand_still(seconds, watched=(0, 1) if is_watched else ())
    return ranks


def explain(ranks: Ranks, result: Optional[Result] = None, host: str = "") -> Hang:
    observed = Observed(host or socket.gethostname(), time.time(), result, None)
    return explain_end(read_flights(ranks.directory), observed)


def ended(status: str, reason: str = "", rank: Optional[int] = None, exception: str = "") -> Result:
    return Result(status, reason, 1.0, 2.0, rank=rank, exception=exception)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 12.0])
def test_ranks_that_were_killed_while_they_moved_are_not_accused(tmp_path: Path, seconds: float) -> None:
    hang = explain(killed_run(tmp_path, seconds))
    assert (hang.culprits, hang.kind) == ((), FROM_OUTSIDE)
    assert hang.verdict.startswith("ended from outside, by no rank of its own: rank ") and "cause" not in hang.verdict
    assert "iteration 7, forward of micro-batch 1" in hang.verdict and len(hang.positions) == 2


def test_ranks_that_were_killed_after_a_long_standstill_are(tmp_path: Path) -> None:
    hang = explain(killed_run(tmp_path, 60.0))
    assert (hang.culprits, hang.kind) == ((1,), "outside") and hang.verdict.startswith("rank 1 is the cause")


def test_a_standstill_counts_against_the_pauses_of_the_run_itself(tmp_path: Path) -> None:
    """Micro-batches of 30 s make a wait of a minute usual, and one of two minutes not."""

    def slow_run(folder: Path, seconds: float) -> Ranks:
        ranks = Ranks(folder, 2, PAIR)
        ranks.progress((0, 1), FORWARD, 7)
        ranks.call((0, 1), "world", "agree.py:9")
        ranks.stand_still(30.0)
        ranks.call((0,), "world", "agree.py:9", returns=False)
        ranks.progress((1,), FORWARD, 8)
        ranks.all_end()
        ranks.stand_still(seconds)
        return ranks

    flights = read_flights(slow_run(tmp_path / "one", 60.0).directory)
    assert longest_pause(flights) == pytest.approx(30.0, abs=1.0)
    assert measure_standstill(flights, (), 0.0).limit == pytest.approx(90.0, abs=3.0)
    assert explain(slow_run(tmp_path / "two", 60.0)).culprits == ()
    assert explain(slow_run(tmp_path / "three", 120.0)).culprits == (1,)


@pytest.mark.parametrize("phase", [START_UP, CHECKPOINT])
def test_start_up_and_checkpoints_may_stand_still_for_long(tmp_path: Path, phase: int) -> None:
    assert explain(killed_run(tmp_path / "one", 5000.0, phase=phase)).culprits == ()
    assert explain(killed_run(tmp_path / "two", 9100.0, phase=phase)).culprits == (1,)


def test_a_rank_that_fell_silent_first_is_the_cause(tmp_path: Path) -> None:
    ranks = killed_run(tmp_path, 30.0)  # both were watched up to here
    ranks.stand_still(60.0, watched=(0,))
    for recorder in ranks.recorders[1:]:
        recorder._seconds[WATCH_OFFSET // 8] -= 60.0
    assert explain(ranks).culprits == (1,)


def test_without_a_watchdog_it_stays_undecided(tmp_path: Path) -> None:
    hang = explain(killed_run(tmp_path, 600.0, is_watched=False))
    assert (hang.culprits, hang.kind) == ((), UNDECIDED) and "node.hang_timeout" in hang.verdict


def test_living_ranks_that_have_just_paused_are_no_hang_yet(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), FORWARD, 7)
    ranks.call((0,), "world", "agree.py:9", returns=False)
    hang = explain(ranks)
    assert (hang.culprits, hang.kind) == ((), PAUSED) and hang.verdict.startswith("no hang yet: rank 0 moved last")
    ranks.stand_still(20.0, watched=())
    assert explain(ranks).culprits == (1,)  # their processes live: no watchdog is needed


def test_records_from_another_machine_may_be_delayed(tmp_path: Path) -> None:
    assert "or it still runs" in explain(killed_run(tmp_path, 1.0), host="login").verdict
    assert "or it still runs" not in explain(killed_run(tmp_path, 1.0), ended(TIMEOUT), host="login").verdict


@pytest.mark.parametrize(
    ("result", "culprits", "kind"),
    [
        (ended(HUNG, "rank 1 is the cause"), (1,), "outside"),
        (ended(OK), (), NO_HANG),
        (ended(INTERRUPTED, "stopped by SIGTERM"), (), FROM_OUTSIDE),
        (ended(TIMEOUT, "ended after 1 min"), (), FROM_OUTSIDE),
        (ended(FAILED, "the launcher was killed by signal 9 (SIGKILL)"), (), FROM_OUTSIDE),
        (ended(FAILED, "mpirun (process 7) on vm, which had started rank 0, is gone", rank=0), (), FROM_OUTSIDE),
        (ended(FAILED, "ranks 0, 1: killed by signal 9 (SIGKILL)", None, "signal 9 (SIGKILL)"), (), FROM_OUTSIDE),
        (ended(FAILED, "a disk is full", exception="RunFailed: a disk is full"), (), NO_HANG),
        (ended(FAILED, "rank 1: killed by signal 9 (SIGKILL)", 1, "signal 9 (SIGKILL)"), (1,), "gone"),
        (ended(FAILED, "rank 0: ValueError: x", 0, "ValueError: x"), (0,), "gone"),
        (ended(OUT_OF_MEMORY, "rank 0: killed by signal 9 (SIGKILL)", 0, "signal 9 (SIGKILL)"), (0,), "gone"),
        (ended(FAILED, "rank 5: killed by signal 9 (SIGKILL)", 5, "signal 9 (SIGKILL)"), (5,), "gone"),
    ],
)
def test_the_result_comes_first(tmp_path: Path, result: Result, culprits: Tuple[int, ...], kind: str) -> None:
    hang = explain(killed_run(tmp_path, 0.5), result)
    assert (hang.culprits, hang.kind) == (culprits, kind), hang.verdict
    assert ("is the cause" in hang.verdict) is bool(culprits)


def test_a_rank_that_the_watchdog_has_ended_is_not_the_cause_while_another_resists_its_end(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), FORWARD, 7)
    ranks.call((0,), "world", "agree.py:9", returns=False)
    recorders, ranks.recorders = ranks.recorders, ranks.recorders[:1]
    ranks.all_end()  # the rank that waits, which the watchdog could end
    ranks.recorders = recorders
    hang = explain(ranks, ended(HUNG, "rank 1 is the cause"))
    assert (hang.culprits, hang.kind) == ((1,), "outside") and "rank 0 waits for it" in hang.verdict


def test_one_rank_that_is_gone_while_another_lives_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), FORWARD, 7)
    ranks.call((0,), "world", "agree.py:9", returns=False)
    recorders, ranks.recorders = ranks.recorders, ranks.recorders[1:]
    ranks.all_end()
    ranks.recorders = recorders
    hang = explain(ranks)
    assert (hang.culprits, hang.kind) == ((1,), "gone") and "is gone" in hang.verdict
    ranks.progress((1,), FINISHED, 7)  # it may end before the others
    assert explain(ranks).culprits == ()
