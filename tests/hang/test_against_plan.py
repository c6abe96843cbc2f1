"""Who is the cause where only the plan of a step can tell: of two ranks, one did otherwise, and nobody saw it."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Tuple

import pytest

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.hang.against_plan import config_or_none
from fugaku_gpt.hang.diagnosis import GONE, Hang, diagnose_hang, read_flights
from fugaku_gpt.layout.grid import coordinates_of, dp_group, embedding_group, pp_group, tp_group
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.layout.sequence import Collective, plan_of, program
from fugaku_gpt.records.flight import FORWARD, LOG, OPTIMISER, SUMS
from tests.doctor.flights import Ranks
from tests.support.tiny import tiny_config


class Said(NamedTuple):
    """A planned call."""

    name: str
    site: str
    operation: str
    shape: Tuple[int, ...]
    peer: Optional[int]


def planned(config: RunConfig, rank: int) -> List[Said]:
    """What a rank says in a step; each communicator's operations have a line of their own."""
    layout = config.layout
    place = coordinates_of(rank, layout)
    stages = pp_group(place, layout)
    said = []
    for part in program(plan_of(config), place.pp):
        if isinstance(part, Collective):
            line = f"{part.communicator}.py:{len(part.operation)}"
            said.append(Said(part.communicator, line, part.operation, (part.elements,), None))
        else:
            for operation, messages in ((RECEIVE, part.exchange.receives), (SEND, part.exchange.sends)):
                for message in messages:
                    said.append(Said("pp", f"pp.py:{operation}", operation, (part.elements,), stages[message.peer]))
    return said


def ranks_of(directory: Path, layout: LayoutConfig) -> Ranks:
    places = [coordinates_of(rank, layout) for rank in range(layout.ranks)]
    groups = {"world": [tuple(range(layout.ranks))]}
    for name, group in (("tp", tp_group), ("dp", dp_group), ("pp", pp_group), ("embedding", embedding_group)):
        groups[name] = sorted({tuple(group(place, layout)) for place in places})
    return Ranks(directory, layout.ranks, groups)


def say(ranks: Ranks, rank: int, step: int, calls: Iterable[Said], waits: bool = False) -> None:
    """A rank makes the calls of a step, or the rest of them; it waits in the last one, or comes out of all."""
    calls = list(calls)
    for number, call in enumerate(calls, start=1):
        phase = FORWARD if call.name in ("tp", "pp") else SUMS
        ranks.progress((rank,), phase, step, 0 if phase == FORWARD else -1)
        ends = not (waits and number == len(calls))
        ranks.call((rank,), call.name, call.site, call.operation, call.shape, call.peer, ends)


def go_on(ranks: Ranks, config: RunConfig, steps: int) -> None:
    for step in range(1, steps + 1):
        for rank in range(config.layout.ranks):
            say(ranks, rank, step, planned(config, rank))
            ranks.progress((rank,), OPTIMISER, step, -1)


def told(ranks: Ranks, config: Optional[RunConfig]) -> Hang:
    return diagnose_hang(read_flights(ranks.directory), config=config)


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_the_one_with_a_call_too_many_is_told_in_the_first_step(tmp_path: Path, culprit: int) -> None:
    config = tiny_config("layout.tp=2")
    ranks = ranks_of(tmp_path, config.layout)
    go_on(ranks, config, 1)
    say(ranks, culprit, 1, planned(config, culprit)[-1:], waits=True)
    say(ranks, 1 - culprit, 2, planned(config, 1 - culprit)[:1], waits=True)
    found = told(ranks, config)
    assert (found.culprits, found.kind, found.other_suspects) == ((culprit,), "one more", ())
    assert found.call is not None and (found.call.communicator, found.call.step) == ("world", 1)
    assert "which is one call more than the plan of a step has" in found.verdict
    assert any(position.absent for position in found.positions)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_message_that_was_not_sent_is_told_by_the_plan_of_its_sender(tmp_path: Path, schedule: str) -> None:
    config = tiny_config("layout.tp=2", "layout.pp=2", f"layout.schedule={schedule}")
    ranks = ranks_of(tmp_path, config.layout)
    go_on(ranks, config, 1)
    calls = planned(config, 0)
    sends = [number for number, call in enumerate(calls) if call.operation == SEND]
    calls.pop(sends[1])
    say(ranks, 0, 2, calls[: sends[-1] + 2], waits=True)
    receives = [number for number, call in enumerate(planned(config, 2)) if call.operation == RECEIVE]
    say(ranks, 2, 2, planned(config, 2)[: receives[-1] + 1], waits=True)
    found = told(ranks, config)
    assert (found.culprits, found.kind) == ((0,), "left out") and found.call is not None
    assert (found.call.operation, found.call.site, found.call.step) == (SEND, "pp.py:send", 2)


def test_a_repeated_bucket_is_no_left_out_one_although_another_like_it_was_due_soon(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2")
    sums = [Said("dp", "dp.py:1", "all_reduce_sum", call.shape, None) for call in planned(config, 0)[:-1]]
    sizes = [call.shape for call in sums]
    at = next(n for n in range(1, len(sums) - 1) if sizes[n - 1] == sizes[n + 1] != sizes[n])  # a short one between
    ranks = ranks_of(tmp_path, config.layout)
    for rank in (0, 1):
        say(ranks, rank, 1, [*sums, *planned(config, rank)[-1:]])
        ranks.progress((rank,), OPTIMISER, 1, -1)
    say(ranks, 0, 2, sums[: at + 1], waits=True)
    say(ranks, 1, 2, [*sums[:at], sums[at - 1], *sums[at:]], waits=True)
    found = told(ranks, config)
    assert (found.culprits, found.kind) == ((1,), "one more") and found.call is not None
    assert (found.call.communicator, found.call.shape) == ("dp", sizes[at - 1])


def test_a_rank_that_fell_out_of_a_step_left_out_the_first_call_that_it_did_not_make(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.pp=2", "layout.zero=1")
    ranks = ranks_of(tmp_path, config.layout)
    go_on(ranks, config, 2)
    sums = next(number for number, call in enumerate(planned(config, 1)) if call.name == "dp")
    for rank in (0, 2, 3):
        at = next(number for number, call in enumerate(planned(config, rank)) if call.name == "dp")
        say(ranks, rank, 3, planned(config, rank)[: at + 1], waits=True)
    say(ranks, 1, 3, planned(config, 1)[:sums])
    ranks.progress((1,), LOG, 3, -1)
    ranks.call((1,), "world", "meter.py:1", "all_reduce_max", (7,), returns=False)
    found = told(ranks, config)
    assert (found.culprits, found.kind) == ((1,), "left out") and found.call is not None
    assert (found.call.communicator, found.call.site, found.call.step) == ("dp", planned(config, 1)[sums].site, 3)


def test_a_message_of_another_size_is_its_senders_even_where_the_sender_is_gone(tmp_path: Path) -> None:
    config = tiny_config("layout.pp=2")
    ranks = ranks_of(tmp_path, config.layout)
    go_on(ranks, config, 1)
    calls = planned(config, 1)
    at = next(number for number, call in enumerate(calls) if call.operation == SEND)
    twice = calls[at]._replace(shape=(2 * calls[at].shape[0],))
    say(ranks, 1, 2, [*calls[:at], twice])
    say(ranks, 0, 2, planned(config, 0)[:3])
    found = diagnose_hang(read_flights(tmp_path), {1: GONE}, config)
    assert (found.culprits, found.kind) == ((1,), "disagree") and found.call is not None
    assert (found.call.operation, found.call.shape) == (SEND, twice.shape)
    assert f"where the plan of a step has send to rank 0 of {list(calls[at].shape)}" in found.verdict


def test_a_call_on_another_communicator_is_named_with_what_was_due(tmp_path: Path) -> None:
    config = tiny_config("layout.tp=2", "layout.pp=2")
    ranks = ranks_of(tmp_path, config.layout)
    go_on(ranks, config, 1)
    calls = planned(config, 2)
    at = max(number for number, call in enumerate(calls) if call.name == "tp")
    say(ranks, 2, 2, [*calls[:at], Said("world", calls[at].site, "all_reduce_sum", (5,), None)], waits=True)
    for rank in (0, 1, 3):
        say(ranks, rank, 2, planned(config, rank)[:3], waits=True)
    found = told(ranks, config)
    assert (found.culprits, found.kind) == ((2,), "order") and found.call is not None
    assert (found.call.communicator, found.call.site) == ("tp", calls[at].site)
    assert "it came to all_reduce_sum of [5] on world" in found.verdict


def test_ranks_that_keep_to_their_plan_are_not_accused(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.zero=1")
    ranks = ranks_of(tmp_path, config.layout)
    go_on(ranks, config, 2)
    say(ranks, 0, 3, planned(config, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 3)
    found = told(ranks, config)
    assert (found.culprits, found.kind) == ((1,), "outside")


def test_steps_without_an_update_gather_nothing_and_are_as_planned(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.zero=1")
    ranks = ranks_of(tmp_path, config.layout)
    for rank in (0, 1):
        say(ranks, rank, 1, [call for call in planned(config, rank) if call.operation != "all_gather"])
    say(ranks, 0, 2, planned(config, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 2)
    assert told(ranks, config).culprits == (1,)


def test_a_plan_that_is_not_the_runs_accuses_nobody(tmp_path: Path) -> None:
    real, other = tiny_config("layout.dp=2"), tiny_config("layout.dp=2", "training.bucket_mib=0.005")
    ranks = ranks_of(tmp_path, real.layout)
    go_on(ranks, real, 3)
    say(ranks, 0, 4, planned(real, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 4)
    ramp = ("training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=5")
    for config in (None, other, tiny_config("layout.dp=2", *ramp)):
        assert (told(ranks, config).culprits, told(ranks, config).kind) == ((1,), "outside")


def test_a_configuration_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert config_or_none(tmp_path / "config.yaml") is None
    (tmp_path / "config.yaml").write_text("model: [", encoding="utf-8")
    assert config_or_none(tmp_path / "config.yaml") is None
