"""Tests of which rank is named as the cause of a hang, from flight recorders with given calls."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from fugaku_gpt.hang.diagnosis import Hang, diagnose_hang, process_states, read_flights
from fugaku_gpt.hang.recorders import GONE, STOPPED
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.records.flight import BACKWARD, FINISHED, FORWARD, OPTIMISER
from tests.doctor.flights import Ranks

TWO_BY_TWO = {"world": [(0, 1, 2, 3)], "tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}
PAIR = {"world": [(0, 1)], "tp": [(0, 1)], "pp": [(0, 1)]}
LAYERS = ("layer.py:1", "layer.py:2", "layer.py:3")


def diagnose(ranks: Ranks, **more: object) -> Hang:
    return diagnose_hang(read_flights(ranks.directory), **more)  # type: ignore[arg-type]


def complete_steps(ranks: Ranks, members: Tuple[int, ...], count: int) -> None:
    """Records healthy steps: a forward and a backward pass of three calls on tp each, and one on all ranks."""
    for step in range(1, count + 1):
        for phase in (FORWARD, BACKWARD):
            ranks.progress(members, phase, step)
            for site in LAYERS:
                ranks.call(members, "tp", site)
        ranks.progress(members, OPTIMISER, step, -1)
        ranks.call(members, "world", "agree.py:9", shape=(6,))


def test_a_rank_that_is_busy_while_the_rest_wait_is_the_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4, TWO_BY_TWO)
    complete_steps(ranks, (0, 1, 2, 3), 2)
    ranks.progress(range(4), FORWARD, 3, 1)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((3,), "tp", LAYERS[0], returns=False)
    ranks.progress((0, 1), OPTIMISER, 3, -1)
    ranks.call((0, 1), "world", "agree.py:9", shape=(6,), returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((2,), "outside")
    assert hang.verdict.startswith("rank 2 is the cause: it is busy outside MPI")
    assert "in iteration 3, forward of micro-batch 1 after all_reduce_sum of [6] on world at agree.py:9" in hang.verdict
    assert [(position.ranks, position.state, position.absent) for position in hang.positions] == [
        ((2,), "outside", ()),
        ((3,), "waits", (2,)),
        ((0, 1), "waits", (2, 3)),
    ]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_call_that_was_left_out_is_inferred_from_earlier_steps(tmp_path: Path, culprit: int) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    complete_steps(ranks, (0, 1), 3)
    ranks.progress((0, 1), FORWARD, 4)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((1 - culprit,), "tp", LAYERS[1])
    ranks.call((culprit,), "tp", LAYERS[2])
    ranks.call((1 - culprit,), "tp", LAYERS[2], returns=False)
    ranks.progress((culprit,), BACKWARD, 4)
    ranks.call((culprit,), "tp", LAYERS[0])
    ranks.call((culprit,), "tp", LAYERS[1], returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind, hang.other_suspects) == ((culprit,), "left out", ())
    assert hang.call is not None and (hang.call.site, hang.call.step) == (LAYERS[1], 4)
    assert f"it left out all_reduce_sum of [4, 8] on tp at {LAYERS[1]}" in hang.verdict


def test_an_extra_call_is_inferred_from_earlier_steps(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    complete_steps(ranks, (0, 1), 3)
    for phase in (FORWARD, BACKWARD):
        ranks.progress((0, 1), phase, 4)
        for site in LAYERS:
            ranks.call((0, 1), "tp", site)
    ranks.call((0,), "tp", LAYERS[2], returns=False)
    ranks.progress((1,), OPTIMISER, 4, -1)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((0,), "one more")
    assert "which is one call more than rank 1 made" in hang.verdict and "on tp at layer.py:3" in hang.verdict


def test_without_earlier_steps_the_other_side_is_named_too(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), FORWARD, 1)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((0,), "tp", LAYERS[1], returns=False)
    ranks.progress((1,), OPTIMISER, 1, -1)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind, hang.other_suspects) == ((1,), "left out", (0,))
    assert hang.verdict.endswith("(or rank 0 did otherwise: nothing earlier is known to tell which)")


def test_of_three_ranks_that_with_another_shape_is_the_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, {"dp": [(0, 1, 2)]})
    ranks.progress(range(3))
    ranks.call((0, 2), "dp", "sum.py:4", shape=(100,), returns=False)
    ranks.call((1,), "dp", "sum.py:4", shape=(90,), returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((1,), "disagree") and hang.call is not None
    assert hang.call.shape == (90,) and "[90]" in hang.verdict and "[100]" in hang.verdict


def test_of_two_ranks_in_a_first_step_both_shapes_are_reported(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, {"pp": [(0, 1)]})
    ranks.progress(range(2))
    ranks.call((0,), "pp", "pipe.py:4", SEND, (8,), peer=1, returns=False)
    ranks.call((1,), "pp", "pipe.py:5", RECEIVE, (16,), peer=0, returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((0, 1), "disagree")
    assert "send to rank 1 of [8]" in hang.verdict and "receive from rank 0 of [16]" in hang.verdict


def test_equally_many_calls_without_an_example_are_reported_of_both_ranks(tmp_path: Path) -> None:
    """A library lets the sum of another shape pass, and both ranks then wait for each other elsewhere."""
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), OPTIMISER, 1, -1)
    ranks.call((0,), "world", "agree.py:9", shape=(12,))
    ranks.call((1,), "world", "agree.py:9", shape=(6,))
    ranks.progress((0, 1), FORWARD, 2)
    ranks.call((0,), "tp", LAYERS[0], returns=False)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    hang = diagnose(ranks)
    assert (hang.kind, {*hang.culprits, *hang.other_suspects}) == ("disagree", {0, 1})
    assert "[12]" in hang.verdict and "[6]" in hang.verdict


def test_a_single_rank_with_one_more_call_is_named_beside_two_equal_sides(tmp_path: Path) -> None:
    """Nothing earlier tells which side is right: the smallest is named, not the one that did least."""
    members = tuple(range(7))
    ranks = Ranks(tmp_path, 7, {"dp": [members], "world": [members]})
    ranks.progress(members, FORWARD, 1)
    for rank, sites in ((0, LAYERS[:2]), (3, LAYERS[1:]), (6, LAYERS)):
        for member in (rank, rank + 1, rank + 2) if rank < 6 else (rank,):
            for site in sites:
                ranks.call((member,), "dp", site)
    ranks.progress(members, OPTIMISER, 1, -1)
    ranks.call(members[:6], "world", "agree.py:9", shape=(6,), returns=False)
    ranks.call((6,), "world", "agree.py:9", shape=(7,), returns=False)
    assert diagnose(ranks).culprits == (6,)


def test_two_groups_in_another_order_are_named_as_such(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    complete_steps(ranks, (0, 1), 3)
    ranks.progress((0, 1), FORWARD, 4)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((0,), "tp", LAYERS[1], returns=False)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((1,), "order") and hang.call is not None
    assert hang.call.site == LAYERS[1] and "the two come in another order there" in hang.verdict


def test_an_unexplained_circular_wait_is_reported_as_a_circle(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1))
    ranks.call((0,), "tp", "a.py:1", returns=False)
    ranks.call((1,), "world", "b.py:2", returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((0, 1), "circle")
    assert hang.verdict.startswith("ranks 0-1 wait for each other, each in a call that another has not come to")


def test_waits_are_followed_from_rank_to_rank(tmp_path: Path) -> None:
    chain = 48
    ranks = Ranks(tmp_path, chain, {"pp": [tuple(range(chain))]})
    ranks.progress(range(chain), FORWARD, 2)
    for rank in range(1, chain):
        ranks.call((rank,), "pp", "pipe.py:7", RECEIVE, peer=rank - 1, returns=False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((0,), "outside")
    assert [position.ranks for position in hang.positions] == [
        (0,),
        tuple(range(1, chain)),
    ]  # equal positions share a line
    assert hang.chain == [
        "ranks 1-47 wait for rank 0 in receive from rank 0 of [4, 8] on pp at pipe.py:7 "
        "(number 1 there; iteration 2, forward of micro-batch 0)"
    ]


def test_a_send_is_waited_for_until_it_is_received(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), BACKWARD)
    ranks.call((0,), "pp", "pipe.py:3", SEND, peer=1, returns=False)
    assert diagnose(ranks).culprits == (1,)


def test_a_rank_that_has_begun_a_sum_and_is_busy_elsewhere_is_waited_for(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, {"dp": [(0, 1)]})
    ranks.progress((0, 1), BACKWARD)
    ranks.call((0,), "dp", "sum.py:1", returns=False)
    recorder = ranks.recorders[1]
    recorder.posted(recorder.enter(0, "all_reduce_sum", "float32", (4, 8), False))
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((1,), "outside")
    assert [(position.ranks, position.absent) for position in hang.positions if position.state == "waits"] == [
        ((0,), (1,))
    ]


def test_missing_finished_and_stopped_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, {"world": [(0, 1, 2)]})
    ranks.progress(range(3))
    ranks.call((0, 1), "world", "a.py:1", returns=False)
    ranks.progress((2,), FINISHED)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((2,), "left out")
    assert "it left out all_reduce_sum of [4, 8] on world at a.py:1" in hang.verdict
    assert diagnose(ranks, processes={2: STOPPED}).kind == STOPPED
    assert "is gone" in diagnose(ranks, processes={2: GONE}).verdict
    ranks.recorders[2].path.unlink()
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind, hang.missing) == ((2,), "missing", (2,))
    assert "left no record: not started, or on a node whose files are not here" in hang.verdict


def test_a_rank_whose_watchdog_fell_silent_is_the_cause_even_where_it_seems_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, 3, {"world": [(0, 1, 2)], "tp": [(0, 1, 2)]})
    ranks.progress(range(3))
    ranks.call((0, 1), "world", "a.py:1", returns=False)
    ranks.call((2,), "tp", "b.py:1", returns=False)
    clock: List[float] = [1000.0]
    monkeypatch.setattr("fugaku_gpt.comm.flight_recorder.time.time", lambda: clock[0])
    ranks.recorders[2].watched(8.0, False)
    clock[0] += 9.0
    for rank in (0, 1):
        ranks.recorders[rank].watched(8.0, False)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((2,), "silent")
    assert "stopped, dead or stuck outside Python" in hang.verdict


def test_without_waiting_ranks_the_longest_unmoved_is_named_and_finished_ranks_are_no_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((1,), FORWARD, 5, 2)
    ranks.progress((0,), FORWARD, 5, 3)
    hang = diagnose(ranks)
    assert (hang.culprits, hang.kind) == ((1,), "outside") and "no rank waits in MPI" in hang.verdict
    ranks.progress((0, 1), FINISHED)
    assert diagnose(ranks).culprits == ()


def test_processes_are_looked_up_where_some_are_alive(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ranks = Ranks(tmp_path, 2, PAIR)
        heads = [flight.head for flight in read_flights(tmp_path)]
        child_head = heads[0].__class__(**{**heads[1].__dict__, "process": child.pid})
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_states([heads[0], child_head], socket.gethostname()) == {1: STOPPED}
    finally:
        child.kill()
        child.wait()
    assert process_states([heads[0], child_head], socket.gethostname()) == {1: GONE}
    assert process_states([child_head], socket.gethostname()) == {}  # all gone: nothing follows from that
    assert process_states([heads[0], child_head], "elsewhere") == {}
    assert len(ranks.recorders) == 2
