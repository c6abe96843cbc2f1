"""Tests of the plan of a checkpoint's calls: who is in one of its gathers has not left the common path."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Tuple

import pytest

from fugaku_gpt.hang.checkpoint_plan import checkpoint_deviation
from fugaku_gpt.hang.diagnosis import Hang, diagnose_hang, read_flights
from fugaku_gpt.records.flight import CHECKPOINT, FINISHED, FORWARD, OPTIMISER
from tests.doctor.flights import Ranks
from tests.support.tiny import tiny_config

Made = Tuple[str, Tuple[int, ...], str]  # operation, shape, line
SHARDS: Made = ("all_gather", (1,), "checkpoint.py:408")
FILES: Made = ("all_gather", (1,), "checkpoint.py:455")
LENGTH: Made = ("broadcast", (1,), "checkpoint.py:268")
TEXT: Made = ("broadcast", (57,), "checkpoint.py:268")
SIZES: Made = ("all_gather", (1,), "checkpoint.py:351")
REPORTS: Made = ("gather_json", (), "checkpoint.py:351")
BEGINS, COMMITS = [SHARDS, FILES, LENGTH, TEXT], [SIZES, REPORTS]


def run_of(folder: Path, calls: Dict[int, List[Made]], step: int = 2, then: Optional[int] = None) -> Ranks:
    """Two ranks that make such calls in the checkpoint of a step, and then begin the next step, or a phase."""
    ranks = Ranks(folder, 2, {"world": [(0, 1)]})
    for rank, made in calls.items():
        ranks.progress((rank,), FORWARD, 1)
        ranks.progress((rank,), OPTIMISER, 1, -1)
        ranks.call((rank,), "world", "trainer.py:407", shape=(6,))
        ranks.progress((rank,), FORWARD, 2)
        ranks.call((rank,), "world", "trainer.py:407", shape=(6,))
        ranks.progress((rank,), CHECKPOINT, step, -1)
        for operation, shape, line in made:
            ranks.call((rank,), "world", line, operation, shape, peer=0 if operation == "broadcast" else None)
        if then is not None:
            ranks.progress((rank,), then, step + (then == FORWARD))
    return ranks


def kinds(ranks: Ranks) -> List[Optional[str]]:
    flights = {flight.rank: flight for flight in read_flights(ranks.directory)}
    deviations = [checkpoint_deviation(flights, rank, 2) for rank in (0, 1)]
    return [deviation.kind if deviation is not None else None for deviation in deviations]


@pytest.mark.parametrize(
    "made",
    [
        [],
        BEGINS,
        BEGINS[1:],  # with a copy for loss spikes
        BEGINS[2:],
        COMMITS,
        [*COMMITS, *BEGINS[2:]],
        [*BEGINS, *COMMITS, LENGTH, TEXT],  # written at once
        [*COMMITS, LENGTH, TEXT, LENGTH, TEXT],  # one is waited for, and the next one begins
        [LENGTH, TEXT, ("barrier", (), "failure.py:80")],
    ],
)
def test_all_ways_to_save_a_checkpoint_are_as_planned(tmp_path: Path, made: List[Made]) -> None:
    assert kinds(run_of(tmp_path / "passed", {0: made, 1: made}, then=FORWARD)) == [None, None]
    for count in range(len(made)):  # and so is each beginning of one
        assert kinds(run_of(tmp_path / str(count), {0: made, 1: made[:count]})) == [None, None]


def test_calls_that_are_not_planned_are_named(tmp_path: Path) -> None:
    assert kinds(run_of(tmp_path / "a", {0: COMMITS, 1: [REPORTS]})) == [None, "order"]
    assert kinds(run_of(tmp_path / "b", {0: COMMITS, 1: [SIZES] * 3})) == [None, "order"]
    assert kinds(run_of(tmp_path / "c", {0: BEGINS, 1: [("broadcast", (9,), "x.py:1")]})) == [None, "order"]
    assert kinds(run_of(tmp_path / "d", {0: COMMITS, 1: [SIZES]}, then=FORWARD)) == [None, "left out"]
    assert kinds(run_of(tmp_path / "e", {0: BEGINS, 1: BEGINS[:3]}, then=FINISHED)) == [None, "left out"]


def diagnose(ranks: Ranks) -> Hang:
    return diagnose_hang(read_flights(ranks.directory), {}, tiny_config("layout.dp=2"))


def test_a_rank_in_the_gather_of_a_checkpoint_has_not_left_the_common_path(tmp_path: Path) -> None:
    """One checkpoint begins, and after the next step the reports of it are gathered: steps differ in their calls."""
    ranks = run_of(tmp_path, {0: BEGINS, 1: BEGINS}, then=FORWARD)
    ranks.progress((0, 1), CHECKPOINT, 3, -1)
    ranks.call((0,), "world", SIZES[2], SIZES[0], SIZES[1])
    ranks.call((0,), "world", REPORTS[2], REPORTS[0], REPORTS[1], returns=False)
    ranks.call((1,), "world", SIZES[2], SIZES[0], SIZES[1], returns=False)
    hang = diagnose(ranks)
    assert hang.kind not in ("order", "left out", "one more", "disagree"), hang.verdict


def test_a_rank_that_leaves_out_a_gather_of_a_checkpoint_is_the_cause(tmp_path: Path) -> None:
    ranks = run_of(tmp_path, {0: [], 1: []})
    ranks.call((0, 1), "world", SIZES[2], SIZES[0], SIZES[1])
    ranks.call((0,), "world", REPORTS[2], REPORTS[0], REPORTS[1], returns=False)
    ranks.progress((1,), FORWARD, 3)
    flights = {flight.rank: flight for flight in read_flights(ranks.directory)}
    deviation = checkpoint_deviation(flights, 1, 2)
    assert deviation is not None and (deviation.culprits, deviation.kind) == ((1,), "left out")
    assert (deviation.call.operation, deviation.call.site) == ("gather_json", REPORTS[2])
