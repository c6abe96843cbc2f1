"""Tests of diagnoses that need the plan of a step: of two ranks one deviates, and no third rank shows which."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Tuple, Union

import pytest

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.hang import against_plan
from fugaku_gpt.hang.against_plan import config_or_problem
from fugaku_gpt.hang.diagnosis import Hang, diagnose_hang, read_flights
from fugaku_gpt.hang.recorders import GONE
from fugaku_gpt.layout.communications import Collective, CommunicationPlan, plan_of, program
from fugaku_gpt.layout.grid import coordinates_of, dp_group, embedding_group, pp_group, tp_group
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.records.flight import FORWARD, LOG, OPTIMISER, SUMS
from tests.doctor.flights import Ranks
from tests.support.tiny import tiny_config


class PlannedCall(NamedTuple):
    """A planned call."""

    name: str
    site: str
    operation: str
    shape: Tuple[int, ...]
    peer: Optional[int]


def planned(config: RunConfig, rank: int, has_checksums: bool = False) -> List[PlannedCall]:
    """Returns the calls of a rank in a step; each operation of a communicator has a line of its own."""
    layout = config.layout
    coordinates = coordinates_of(rank, layout)
    stages = pp_group(coordinates, layout)
    calls = []
    for step in program(plan_of(config), coordinates.pp, has_checksums=has_checksums):
        if isinstance(step, Collective):
            line = f"{step.communicator}.py:{len(step.operation)}"
            calls.append(PlannedCall(step.communicator, line, step.operation, (step.elements,), None))
        else:
            for operation, messages in ((RECEIVE, step.exchange.receives), (SEND, step.exchange.sends)):
                for message in messages:
                    calls.append(
                        PlannedCall("pp", f"pp.py:{operation}", operation, (step.elements,), stages[message.peer])
                    )
    return calls


def ranks_of(directory: Path, layout: LayoutConfig) -> Ranks:
    coordinates_of_ranks = [coordinates_of(rank, layout) for rank in range(layout.ranks)]
    groups = {"world": [tuple(range(layout.ranks))]}
    for name, group in (("tp", tp_group), ("dp", dp_group), ("pp", pp_group), ("embedding", embedding_group)):
        groups[name] = sorted({tuple(group(coordinates, layout)) for coordinates in coordinates_of_ranks})
    return Ranks(directory, layout.ranks, groups)


def record_calls(ranks: Ranks, rank: int, step: int, calls: Iterable[PlannedCall], waits: bool = False) -> None:
    """Records calls of a rank in a step, all or the rest of them; it waits in the last one, or returns from all."""
    calls = list(calls)
    for number, call in enumerate(calls, start=1):
        phase = FORWARD if call.name in ("tp", "pp") else SUMS
        ranks.progress((rank,), phase, step, 0 if phase == FORWARD else -1)
        ends = not (waits and number == len(calls))
        ranks.call((rank,), call.name, call.site, call.operation, call.shape, call.peer, ends)


def complete_steps(ranks: Ranks, config: RunConfig, steps: int) -> None:
    for step in range(1, steps + 1):
        for rank in range(config.layout.ranks):
            record_calls(ranks, rank, step, planned(config, rank))
            ranks.progress((rank,), OPTIMISER, step, -1)


def diagnose(ranks: Ranks, config: Union[RunConfig, str, None]) -> Hang:
    return diagnose_hang(read_flights(ranks.directory), config=config)


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_that_with_an_extra_call_is_named_in_the_first_step(tmp_path: Path, culprit: int) -> None:
    config = tiny_config("layout.tp=2")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 1)
    record_calls(ranks, culprit, 1, planned(config, culprit)[-1:], waits=True)
    record_calls(ranks, 1 - culprit, 2, planned(config, 1 - culprit)[:1], waits=True)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind, hang.other_suspects) == ((culprit,), "one more", ())
    assert hang.call is not None and (hang.call.communicator, hang.call.step) == ("world", 1)
    assert "which is one call more than the plan of a step has" in hang.verdict
    assert any(position.absent for position in hang.positions)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_message_that_was_not_sent_is_named_from_the_plan_of_the_sender(tmp_path: Path, schedule: str) -> None:
    config = tiny_config("layout.tp=2", "layout.pp=2", f"layout.schedule={schedule}")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 1)
    calls = planned(config, 0)
    sends = [number for number, call in enumerate(calls) if call.operation == SEND]
    calls.pop(sends[1])
    record_calls(ranks, 0, 2, calls[: sends[-1] + 2], waits=True)
    receives = [number for number, call in enumerate(planned(config, 2)) if call.operation == RECEIVE]
    record_calls(ranks, 2, 2, planned(config, 2)[: receives[-1] + 1], waits=True)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind) == ((0,), "left out") and hang.call is not None
    assert (hang.call.operation, hang.call.site, hang.call.step) == (SEND, "pp.py:send", 2)


def test_a_repeated_bucket_is_an_extra_call_although_an_equal_bucket_was_due_soon(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2")
    sums = [PlannedCall("dp", "dp.py:1", "all_reduce_sum", call.shape, None) for call in planned(config, 0)[:-1]]
    sizes = [call.shape for call in sums]
    # a short bucket between two equal ones
    position = next(n for n in range(1, len(sums) - 1) if sizes[n - 1] == sizes[n + 1] != sizes[n])
    ranks = ranks_of(tmp_path, config.layout)
    for rank in (0, 1):
        record_calls(ranks, rank, 1, [*sums, *planned(config, rank)[-1:]])
        ranks.progress((rank,), OPTIMISER, 1, -1)
    record_calls(ranks, 0, 2, sums[: position + 1], waits=True)
    record_calls(ranks, 1, 2, [*sums[:position], sums[position - 1], *sums[position:]], waits=True)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind) == ((1,), "one more") and hang.call is not None
    assert (hang.call.communicator, hang.call.shape) == ("dp", sizes[position - 1])


def test_a_rank_that_leaves_a_step_early_left_out_the_first_call_that_it_did_not_make(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.pp=2", "layout.zero=1")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 2)
    sums = next(number for number, call in enumerate(planned(config, 1)) if call.name == "dp")
    for rank in (0, 2, 3):
        position = next(number for number, call in enumerate(planned(config, rank)) if call.name == "dp")
        record_calls(ranks, rank, 3, planned(config, rank)[: position + 1], waits=True)
    record_calls(ranks, 1, 3, planned(config, 1)[:sums])
    ranks.progress((1,), LOG, 3, -1)
    ranks.call((1,), "world", "meter.py:1", "all_reduce_max", (7,), returns=False)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind) == ((1,), "left out") and hang.call is not None
    assert (hang.call.communicator, hang.call.site, hang.call.step) == ("dp", planned(config, 1)[sums].site, 3)


def test_a_message_of_another_size_is_the_fault_of_the_sender_even_if_it_is_gone(tmp_path: Path) -> None:
    config = tiny_config("layout.pp=2")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 1)
    calls = planned(config, 1)
    position = next(number for number, call in enumerate(calls) if call.operation == SEND)
    oversized = calls[position]._replace(shape=(2 * calls[position].shape[0],))
    record_calls(ranks, 1, 2, [*calls[:position], oversized])
    record_calls(ranks, 0, 2, planned(config, 0)[:3])
    hang = diagnose_hang(read_flights(tmp_path), {1: GONE}, config)
    assert (hang.culprits, hang.kind) == ((1,), "disagree") and hang.call is not None
    assert (hang.call.operation, hang.call.shape) == (SEND, oversized.shape)
    assert f"where the plan of a step has send to rank 0 of {list(calls[position].shape)}" in hang.verdict


def test_a_call_on_another_communicator_is_named_with_the_call_that_was_due(tmp_path: Path) -> None:
    config = tiny_config("layout.tp=2", "layout.pp=2")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 1)
    calls = planned(config, 2)
    position = max(number for number, call in enumerate(calls) if call.name == "tp")
    record_calls(
        ranks,
        2,
        2,
        [*calls[:position], PlannedCall("world", calls[position].site, "all_reduce_sum", (5,), None)],
        waits=True,
    )
    for rank in (0, 1, 3):
        record_calls(ranks, rank, 2, planned(config, rank)[:3], waits=True)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind) == ((2,), "order") and hang.call is not None
    assert (hang.call.communicator, hang.call.site) == ("tp", calls[position].site)
    assert "it came to all_reduce_sum of [5] on world" in hang.verdict


def test_ranks_that_keep_to_their_plan_are_not_accused(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.zero=1")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 2)
    record_calls(ranks, 0, 3, planned(config, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 3)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind) == ((1,), "outside")


def test_a_rank_that_leaves_out_a_comparison_of_checksums_is_named(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.zero=1", "training.checksum_interval=3")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 2)
    compares = planned(config, 0, has_checksums=True)
    position = next(number for number, call in enumerate(compares) if call.operation == "all_reduce_max")
    record_calls(ranks, 0, 3, compares[: position + 1], waits=True)
    record_calls(ranks, 1, 3, planned(config, 1)[: position + 1], waits=True)  # it comes to the gathers
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.call is not None and hang.call.step) == ((1,), 3)
    assert "all_reduce_max" in hang.verdict


def test_a_step_that_compares_checksums_is_as_planned(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.zero=0", "training.checksum_interval=2")
    ranks = ranks_of(tmp_path, config.layout)
    for step in (1, 2):
        for rank in (0, 1):
            record_calls(ranks, rank, step, planned(config, rank, has_checksums=step == 2))
            ranks.progress((rank,), OPTIMISER, step, -1)
    record_calls(ranks, 0, 3, planned(config, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 3)
    hang = diagnose(ranks, config)
    assert (hang.culprits, hang.kind) == ((1,), "outside")


def test_steps_without_an_update_gather_nothing_and_are_as_planned(tmp_path: Path) -> None:
    config = tiny_config("layout.dp=2", "layout.zero=1")
    ranks = ranks_of(tmp_path, config.layout)
    for rank in (0, 1):
        record_calls(ranks, rank, 1, [call for call in planned(config, rank) if call.operation != "all_gather"])
    record_calls(ranks, 0, 2, planned(config, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 2)
    assert diagnose(ranks, config).culprits == (1,)


def test_a_plan_of_another_run_accuses_nobody(tmp_path: Path) -> None:
    real, other = tiny_config("layout.dp=2"), tiny_config("layout.dp=2", "training.bucket_mib=0.005")
    ranks = ranks_of(tmp_path, real.layout)
    complete_steps(ranks, real, 3)
    record_calls(ranks, 0, 4, planned(real, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 4)
    ramp = ("training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=5")
    for config in (None, other, tiny_config("layout.dp=2", *ramp)):
        assert (diagnose(ranks, config).culprits, diagnose(ranks, config).kind) == ((1,), "outside")


def test_a_hang_says_why_it_was_not_compared_with_the_plan(tmp_path: Path) -> None:
    real = tiny_config("layout.dp=2")
    ranks = ranks_of(tmp_path / "flight", real.layout)
    complete_steps(ranks, real, 3)
    record_calls(ranks, 0, 4, planned(real, 0)[:1], waits=True)
    ranks.progress((1,), FORWARD, 4)
    batch_ramp = ("training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=5")
    length_ramp = ("training.seq_ramp_start=4", "training.seq_ramp_increment=4", "training.seq_ramp_iterations=5")
    reasons = {
        "": real,
        "the batch grows": tiny_config("layout.dp=2", *batch_ramp),
        "the sequence length grows": tiny_config("layout.dp=2", *length_ramp),
        "another run's: it has 1 ranks, the recorders 2": tiny_config(),
        "the plan is not that of 2 ranks": tiny_config("layout.dp=2", "training.bucket_mib=0.005"),
        "config.yaml: no such file": config_or_problem(tmp_path / "config.yaml"),
    }
    for reason, config in reasons.items():
        hang = diagnose(ranks, config)
        assert hang.culprits == (1,) and reason in hang.not_compared and bool(hang.not_compared) is bool(reason)


def test_a_plan_that_cannot_be_made_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: RunConfig) -> CommunicationPlan:
        raise ValueError("stages of unequal length\nmore")

    real = tiny_config("layout.dp=2")
    ranks = ranks_of(tmp_path, real.layout)
    record_calls(ranks, 0, 1, planned(real, 0)[:1], waits=True)
    monkeypatch.setattr(against_plan, "plan_of", refuse)
    assert diagnose(ranks, real).not_compared == "there is no plan: stages of unequal length"


def test_ranks_beyond_the_largest_number_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("layout.dp=3", "training.global_batch=24")
    ranks = ranks_of(tmp_path, config.layout)
    complete_steps(ranks, config, 1)
    record_calls(ranks, 0, 1, planned(config, 0)[-1:], waits=True)
    assert (diagnose(ranks, config).kind, diagnose(ranks, config).not_compared) == ("one more", "")
    monkeypatch.setattr(against_plan, "_MAX_RANKS", 2)  # the suspects are the ranks that rank 0 waits for
    hang = diagnose(ranks, config)
    assert (hang.kind, hang.not_compared) == ("outside", "only 2 of 3 ranks are compared")


def test_a_configuration_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    assert "config.yaml" in str(config_or_problem(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("model: [", encoding="utf-8")
    problem = config_or_problem(tmp_path / "config.yaml")
    assert isinstance(problem, str) and "config.yaml" in problem and "\n" not in problem


def test_a_stage_whose_ranks_all_leave_the_plan_alike_is_a_reason(tmp_path: Path) -> None:
    real, other = tiny_config("layout.dp=2"), tiny_config("layout.dp=2", "training.bucket_mib=0.005")
    ranks = ranks_of(tmp_path, real.layout)
    for rank in (0, 1):
        record_calls(ranks, rank, 1, planned(real, rank))
    ranks.progress((1,), FORWARD, 2)
    assert "all ranks of a pipeline stage leave it by the same call" in diagnose(ranks, other).not_compared
