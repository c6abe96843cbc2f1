"""Who is the cause of a hang, told from the flight recorders of ranks whose calls are known."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from fugaku_gpt.hang.diagnosis import GONE, STOPPED, Hang, diagnose_hang, process_states, read_flights
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.records.flight import BACKWARD, FINISHED, FORWARD, OPTIMISER
from tests.doctor.flights import Ranks

TWO_BY_TWO = {"world": [(0, 1, 2, 3)], "tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}
PAIR = {"world": [(0, 1)], "tp": [(0, 1)], "pp": [(0, 1)]}
LAYERS = ("layer.py:1", "layer.py:2", "layer.py:3")


def told(ranks: Ranks, **more: object) -> Hang:
    return diagnose_hang(read_flights(ranks.directory), **more)  # type: ignore[arg-type]


def steps(ranks: Ranks, members: Tuple[int, ...], count: int) -> None:
    """Healthy steps: a forward and a backward pass of three calls on tp each, and one on all ranks."""
    for step in range(1, count + 1):
        for phase in (FORWARD, BACKWARD):
            ranks.progress(members, phase, step)
            for site in LAYERS:
                ranks.call(members, "tp", site)
        ranks.progress(members, OPTIMISER, step, -1)
        ranks.call(members, "world", "agree.py:9", shape=(6,))


def test_a_rank_that_is_busy_while_the_others_wait_is_the_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4, TWO_BY_TWO)
    steps(ranks, (0, 1, 2, 3), 2)
    ranks.progress(range(4), FORWARD, 3, 1)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((3,), "tp", LAYERS[0], returns=False)
    ranks.progress((0, 1), OPTIMISER, 3, -1)
    ranks.call((0, 1), "world", "agree.py:9", shape=(6,), returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((2,), "outside")
    assert found.verdict.startswith("rank 2 is the cause: it is busy outside MPI")
    assert (
        "in iteration 3, forward of micro-batch 1 after all_reduce_sum of [6] on world at agree.py:9" in found.verdict
    )
    assert [(position.ranks, position.state, position.absent) for position in found.positions] == [
        ((2,), "outside", ()),
        ((3,), "waits", (2,)),
        ((0, 1), "waits", (2, 3)),
    ]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_call_that_was_left_out_is_told_from_earlier_steps(tmp_path: Path, culprit: int) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    steps(ranks, (0, 1), 3)
    ranks.progress((0, 1), FORWARD, 4)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((1 - culprit,), "tp", LAYERS[1])
    ranks.call((culprit,), "tp", LAYERS[2])
    ranks.call((1 - culprit,), "tp", LAYERS[2], returns=False)
    ranks.progress((culprit,), BACKWARD, 4)
    ranks.call((culprit,), "tp", LAYERS[0])
    ranks.call((culprit,), "tp", LAYERS[1], returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind, found.other_suspects) == ((culprit,), "left out", ())
    assert found.call is not None and (found.call.site, found.call.step) == (LAYERS[1], 4)
    assert f"it left out all_reduce_sum of [4, 8] on tp at {LAYERS[1]}" in found.verdict


def test_a_call_too_many_is_told_from_earlier_steps(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    steps(ranks, (0, 1), 3)
    for phase in (FORWARD, BACKWARD):
        ranks.progress((0, 1), phase, 4)
        for site in LAYERS:
            ranks.call((0, 1), "tp", site)
    ranks.call((0,), "tp", LAYERS[2], returns=False)
    ranks.progress((1,), OPTIMISER, 4, -1)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((0,), "one more")
    assert "which is one call more than rank 1 made" in found.verdict and "on tp at layer.py:3" in found.verdict


def test_without_earlier_steps_the_other_side_is_named_too(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), FORWARD, 1)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((0,), "tp", LAYERS[1], returns=False)
    ranks.progress((1,), OPTIMISER, 1, -1)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind, found.other_suspects) == ((1,), "left out", (0,))
    assert found.verdict.endswith("(or rank 0 did otherwise: nothing earlier is known to tell which)")


def test_of_three_ranks_the_one_with_another_shape_is_the_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, {"dp": [(0, 1, 2)]})
    ranks.progress(range(3))
    ranks.call((0, 2), "dp", "sum.py:4", shape=(100,), returns=False)
    ranks.call((1,), "dp", "sum.py:4", shape=(90,), returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((1,), "disagree") and found.call is not None
    assert found.call.shape == (90,) and "[90]" in found.verdict and "[100]" in found.verdict


def test_of_two_ranks_and_one_step_both_shapes_are_told(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, {"pp": [(0, 1)]})
    ranks.progress(range(2))
    ranks.call((0,), "pp", "pipe.py:4", SEND, (8,), peer=1, returns=False)
    ranks.call((1,), "pp", "pipe.py:5", RECEIVE, (16,), peer=0, returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((0, 1), "disagree")
    assert "send to rank 1 of [8]" in found.verdict and "receive from rank 0 of [16]" in found.verdict


def test_two_groups_in_another_order_are_named_as_such(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    steps(ranks, (0, 1), 3)
    ranks.progress((0, 1), FORWARD, 4)
    ranks.call((0, 1), "tp", LAYERS[0])
    ranks.call((0,), "tp", LAYERS[1], returns=False)
    ranks.call((1,), "world", "agree.py:9", shape=(6,), returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((1,), "order") and found.call is not None
    assert found.call.site == LAYERS[1] and "the two come in another order there" in found.verdict


def test_a_circle_that_nothing_explains_is_told_as_one(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1))
    ranks.call((0,), "tp", "a.py:1", returns=False)
    ranks.call((1,), "world", "b.py:2", returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((0, 1), "circle")
    assert found.verdict.startswith("ranks 0-1 wait for each other, each in a call that another has not come to")


def test_waits_are_followed_from_rank_to_rank(tmp_path: Path) -> None:
    chain = 48
    ranks = Ranks(tmp_path, chain, {"pp": [tuple(range(chain))]})
    ranks.progress(range(chain), FORWARD, 2)
    for rank in range(1, chain):
        ranks.call((rank,), "pp", "pipe.py:7", RECEIVE, peer=rank - 1, returns=False)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((0,), "outside")
    assert [position.ranks for position in found.positions] == [(0,), tuple(range(1, chain))]  # equal places, one line
    assert found.chain == [
        "ranks 1-47 wait for rank 0 in receive from rank 0 of [4, 8] on pp at pipe.py:7 "
        "(number 1 there; iteration 2, forward of micro-batch 0)"
    ]


def test_a_send_is_waited_for_until_it_is_received(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((0, 1), BACKWARD)
    ranks.call((0,), "pp", "pipe.py:3", SEND, peer=1, returns=False)
    assert told(ranks).culprits == (1,)


def test_a_rank_that_has_begun_a_sum_and_is_busy_elsewhere_is_waited_for(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, {"dp": [(0, 1)]})
    ranks.progress((0, 1), BACKWARD)
    ranks.call((0,), "dp", "sum.py:1", returns=False)
    recorder = ranks.recorders[1]
    recorder.posted(recorder.enter(0, "all_reduce_sum", "float32", (4, 8), False))
    found = told(ranks)
    assert (found.culprits, found.kind) == ((1,), "outside")
    assert [(position.ranks, position.absent) for position in found.positions if position.state == "waits"] == [
        ((0,), (1,))
    ]


def test_missing_finished_and_stopped_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, {"world": [(0, 1, 2)]})
    ranks.progress(range(3))
    ranks.call((0, 1), "world", "a.py:1", returns=False)
    ranks.progress((2,), FINISHED)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((2,), "left out")
    assert "it left out all_reduce_sum of [4, 8] on world at a.py:1" in found.verdict
    assert told(ranks, processes={2: STOPPED}).kind == STOPPED
    assert "is gone" in told(ranks, processes={2: GONE}).verdict
    ranks.recorders[2].path.unlink()
    found = told(ranks)
    assert (found.culprits, found.kind, found.missing) == ((2,), "missing", (2,))
    assert "left no record: not started, or on a node whose files are not here" in found.verdict


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
    found = told(ranks)
    assert (found.culprits, found.kind) == ((2,), "silent")
    assert "stopped, dead or stuck outside Python" in found.verdict


def test_where_nobody_waits_the_longest_unmoved_is_named_and_finished_ones_are_no_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, PAIR)
    ranks.progress((1,), FORWARD, 5, 2)
    ranks.progress((0,), FORWARD, 5, 3)
    found = told(ranks)
    assert (found.culprits, found.kind) == ((1,), "outside") and "no rank waits in MPI" in found.verdict
    ranks.progress((0, 1), FINISHED)
    assert told(ranks).culprits == ()


def test_processes_are_looked_up_where_some_are_alive(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ranks = Ranks(tmp_path, 2, PAIR)
        heads = [flight.head for flight in read_flights(tmp_path)]
        own = heads[0].__class__(**{**heads[1].__dict__, "process": child.pid})
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_states([heads[0], own], socket.gethostname()) == {1: STOPPED}
    finally:
        child.kill()
        child.wait()
    assert process_states([heads[0], own], socket.gethostname()) == {1: GONE}
    assert process_states([own], socket.gethostname()) == {}  # all gone: nothing follows from that
    assert process_states([heads[0], own], "elsewhere") == {}
    assert len(ranks.recorders) == 2
