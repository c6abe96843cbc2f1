"""Tests of pipeline schedules (complete, free of deadlock, as fast as their formulas) and of their checker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.layout.schedule_check import ScheduleError, ScheduleReport, check_schedules
from fugaku_gpt.layout.schedule_times import Timing, ideal_bubble, simulate
from fugaku_gpt.layout.schedules import (
    KINDS,
    Action,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Message,
    schedule,
)

Shape = Tuple[str, int, int, int]  # kind, stages, micro-batches, chunks


@st.composite
def shapes(draw: Any, least_stages: int = 1) -> Shape:
    """Draws a schedule of any kind, with up to 8 stages, 16 micro-batches and 3 chunks."""
    kind = draw(st.sampled_from(KINDS))
    chunks = draw(st.integers(1, 3)) if kind == "interleaved" else 1
    return kind, draw(st.integers(least_stages, 8)), draw(st.integers(1, 16)), chunks


def all_stages(shape: Shape) -> List[List[Action]]:
    """Returns the schedule of every stage."""
    kind, stages, micro_batches, chunks = shape
    return [list(schedule(kind, stage, stages, micro_batches, chunks)) for stage in range(stages)]


def check(schedules: List[List[Action]], shape: Shape) -> ScheduleReport:
    """Returns the checker's report."""
    return check_schedules(schedules, shape[2], shape[3])


@settings(max_examples=400, deadline=None)
@given(shapes())
@pytest.mark.slow
def test_every_schedule_is_complete_and_free_of_deadlock(shape: Shape) -> None:
    kind, stages, micro_batches, chunks = shape
    report = check(all_stages(shape), shape)
    assert report.messages == 2 * micro_batches * (stages * chunks - 1) * (stages > 1)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(shapes())
def test_chunks_see_micro_batches_in_order_whatever_the_kind(shape: Shape) -> None:
    for actions in all_stages(shape):
        for kind in (Forward, BackwardInput, BackwardWeight):
            seen = [(a.chunk, a.micro_batch) for a in actions if not isinstance(a, Exchange) and type(a) is kind]
            assert sorted(seen) == sorted(seen, key=lambda pair: pair[0])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(shapes(), st.sampled_from([1.0, 2.0, 3.0]))
def test_the_bubble_is_that_of_the_formula(shape: Shape, backward: float) -> None:
    kind, stages, micro_batches, chunks = shape
    if kind == "zero_bubble":
        times = simulate(all_stages(shape), Timing(forward=1.0, backward=2.0, weights=1.0))
        assert times.bubble == pytest.approx([ideal_bubble(*shape)] * stages)
        assert micro_batches < stages or ideal_bubble(*shape) == pytest.approx((stages - 1) / (3 * micro_batches))
        return
    times = simulate(all_stages(shape), Timing(forward=1.0, backward=backward))
    assert times.bubble == pytest.approx([ideal_bubble(*shape)] * stages)
    if kind != "interleaved" or micro_batches >= stages:
        assert ideal_bubble(*shape) == pytest.approx((stages - 1) / (micro_batches * chunks))
    assert times.idle_share[0] == pytest.approx(1 - 1 / (1 + times.bubble[0]))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(shapes())
def test_waiting_at_once_costs_nothing_where_stages_run_in_lockstep(shape: Shape) -> None:
    kind, stages, _, chunks = shape
    backward = 2.0 if chunks == 1 else 1.0
    times = simulate(all_stages(shape), Timing(forward=1.0, backward=backward), waits_on_use=False)
    assert times.bubble == pytest.approx([ideal_bubble(*shape)] * stages)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(shapes(), st.floats(0.1, 4), st.floats(0.1, 4), st.floats(0, 1))
def test_waiting_on_use_is_never_slower(shape: Shape, forward: float, backward: float, latency: float) -> None:
    schedules, timing = all_stages(shape), Timing(forward, backward, latency)
    on_use, strict = (simulate(schedules, timing, waits_on_use).makespan for waits_on_use in (True, False))
    assert on_use <= strict + 1e-9
    assert on_use >= max(simulate(schedules, timing).busy) - 1e-9


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.integers(1, 8), st.integers(0, 16), st.floats(0.2, 4), st.floats(0.2, 4), st.floats(0.1, 0.9))
def test_deferring_weight_gradients_shortens_the_bubble_by_their_time(
    stages: int, more: int, forward: float, backward: float, share: float
) -> None:
    weights = share * backward
    shape = ("zero_bubble", stages, stages + more, 1)
    times = simulate(all_stages(shape), Timing(forward, backward, weights=weights))
    plain = simulate(all_stages(("1f1b", *shape[1:])), Timing(forward, backward))
    assert times.busy == pytest.approx(plain.busy)
    assert times.makespan <= plain.makespan + 1e-9
    if weights <= min(forward, backward - weights):  # there is room for all of them
        idle = (stages - 1) * (forward + backward - 2 * weights)
        assert times.makespan == pytest.approx(times.busy[0] + idle)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 16))
def test_no_stage_of_zero_bubble_holds_more_than_the_first_of_1f1b(stages: int, micro_batches: int) -> None:
    shape = ("zero_bubble", stages, micro_batches, 1)
    report = check(all_stages(shape), shape)
    assert report.peak_in_flight == tuple(min(micro_batches, stages - stage) for stage in range(stages))
    assert max(report.peak_retained) <= min(micro_batches, stages + 1)


def test_the_bubble_of_the_run_on_13824_nodes() -> None:
    shape = ("1f1b", 8, 7, 1)
    times = simulate(all_stages(shape))
    assert times.idle_share == pytest.approx([0.5] * 8)
    halved = simulate(all_stages(("interleaved", 8, 8, 4)))
    assert halved.bubble == pytest.approx([7 / 32] * 8)
    third = simulate(all_stages(("zero_bubble", 8, 8, 1)))
    assert third.bubble == pytest.approx([7 / 24] * 8)


def test_the_makespan_follows_the_slowest_stage_and_the_latency_of_hops() -> None:
    schedules = all_stages(("1f1b", 3, 4, 1))
    slow = simulate(schedules, Timing(forward=[1, 3, 1], backward=[2, 6, 2]))
    assert slow.makespan == 4 * 9 + 1 + 2 and slow.busy == (12, 36, 12)
    assert simulate(all_stages(("gpipe", 3, 1, 1)), Timing(1, 2, latency=0.5)).makespan == 3 * 3 + 4 * 0.5


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 16))
def test_in_flight_micro_batches_of_gpipe_and_1f1b(stages: int, micro_batches: int) -> None:
    report_gpipe = check_schedules(all_stages(("gpipe", stages, micro_batches, 1)), micro_batches)
    assert report_gpipe.peak_in_flight == (micro_batches,) * stages
    report_1f1b = check_schedules(all_stages(("1f1b", stages, micro_batches, 1)), micro_batches)
    assert report_1f1b.peak_in_flight == tuple(min(micro_batches, stages - stage) for stage in range(stages))


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 3))
def test_in_flight_chunks_of_interleaving(stages: int, groups: int, chunks: int) -> None:
    # Megatron-LM's: the warm-up of stage s, and one more
    shape = ("interleaved", stages, groups * stages, chunks)
    peak = check(all_stages(shape), shape).peak_in_flight
    warm_up = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    assert peak == tuple(min(groups * stages * chunks, count + 1) for count in warm_up)


def test_interleaving_a_single_chunk_is_1f1b_and_a_single_stage_needs_no_messages() -> None:
    assert all_stages(("interleaved", 4, 6, 1)) == all_stages(("1f1b", 4, 6, 1))
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3)):
        assert not any(isinstance(action, Exchange) for action in schedule(kind, 0, 1, 5, chunks))
    assert schedule("1f1b", 0, 1, 2) == (Forward(0, 0), BackwardInput(0, 0), Forward(1, 0), BackwardInput(1, 0))


def test_a_schedule_reads_as_in_the_papers() -> None:
    assert schedule("1f1b", 1, 2, 2) == (
        Exchange((), (Message("activation", 0, 1, peer=0),)),
        Forward(0, 1),
        Exchange((), (Message("activation", 1, 1, peer=0),)),
        BackwardInput(0, 1),
        Exchange((Message("gradient", 0, 0, peer=0),), ()),
        Forward(1, 1),
        BackwardInput(1, 1),
        Exchange((Message("gradient", 1, 0, peer=0),), ()),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 0, 2, 2), "valid: gpipe, 1f1b, interleaved, zero_bubble"),
        (("1f1b", 0, 2, 2, 2), "valid: 1, or the schedule interleaved"),
        (("1f1b", 2, 2, 2), "stage 2: valid: 0 to 1"),
        (("1f1b", 0, 2, 0), "valid: 1 or more"),
        (("gpipe", 0, 0, 1), "valid: 1 or more"),
        (("interleaved", 0, 2, 2, 0), "valid: 1 or more"),
    ],
)
def test_invalid_values_are_refused(arguments: Tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zero_bubble", 1)])
def test_32_stages_of_64_micro_batches(kind: str, chunks: int) -> None:
    shape = (kind, 32, 64, chunks)
    schedules = all_stages(shape)
    report = check(schedules, shape)
    assert report.messages == 2 * 64 * (32 * chunks - 1)
    assert simulate(schedules).bubble[0] == pytest.approx(ideal_bubble(*shape))


# Mutations: the checker against schedules that are almost right.


def _exchanges(schedules: List[List[Action]]) -> List[Tuple[int, int, Exchange]]:
    return [(s, p, a) for s, actions in enumerate(schedules) for p, a in enumerate(actions) if isinstance(a, Exchange)]


def _pick(data: Any, schedules: List[List[Action]]) -> Tuple[int, int, str, int, Exchange]:
    stage, position, exchange = data.draw(st.sampled_from(_exchanges(schedules)))
    side = data.draw(st.sampled_from([name for name in ("sends", "receives") if getattr(exchange, name)]))
    return stage, position, side, data.draw(st.integers(0, len(getattr(exchange, side)) - 1)), exchange


def _changed(exchange: Exchange, side: str, messages: Tuple[Message, ...]) -> Exchange:
    return replace(exchange, **{side: messages})


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(shapes(least_stages=2), st.data())
def test_a_dropped_message_is_detected(shape: Shape, data: Any) -> None:
    schedules = all_stages(shape)
    stage, position, side, index, exchange = _pick(data, schedules)
    messages = getattr(exchange, side)
    schedules[stage][position] = _changed(exchange, side, messages[:index] + messages[index + 1 :])
    with pytest.raises(ScheduleError):
        check(schedules, shape)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(shapes(least_stages=2), st.data())
def test_a_changed_message_is_detected(shape: Shape, data: Any) -> None:
    schedules = all_stages(shape)
    stage, position, side, index, exchange = _pick(data, schedules)
    messages = list(getattr(exchange, side))
    other = {"activation": "gradient", "gradient": "activation"}[messages[index].kind]
    change = data.draw(
        st.sampled_from(
            [
                {"peer": (messages[index].peer + 1) % shape[1]},
                {"peer": stage},
                {"peer": -1},
                {"peer": shape[1]},
                {"micro_batch": messages[index].micro_batch + 1},
                {"chunk": messages[index].chunk + 1},
                {"kind": other},
            ]
        )
    )
    mutant = Message(**{**{n: getattr(messages[index], n) for n in ("kind", "micro_batch", "chunk", "peer")}, **change})
    if mutant == messages[index]:  # with one other stage, the next peer is the same
        return
    messages[index] = mutant
    schedules[stage][position] = _changed(exchange, side, tuple(messages))
    with pytest.raises(ScheduleError):
        check(schedules, shape)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(shapes(), st.data())
def test_a_missing_repeated_or_moved_computation_is_detected(shape: Shape, data: Any) -> None:
    schedules = all_stages(shape)
    stage = data.draw(st.integers(0, shape[1] - 1))
    actions = schedules[stage]
    position = data.draw(st.sampled_from([p for p, a in enumerate(actions) if not isinstance(a, Exchange)]))
    action = actions[position]
    assert not isinstance(action, Exchange)
    is_optional = (
        isinstance(action, BackwardWeight) and shape[1] * shape[2] == 1
    )  # without it, the schedule defers nothing
    mutants: List[List[Action]] = [
        [action, action],
        *([] if is_optional else [[]]),
        [type(action)(action.micro_batch, action.chunk + 1)],
        [type(action)(shape[2], action.chunk)],
        [type(action)(-1, action.chunk)],
        [BackwardInput(action.micro_batch, action.chunk) if isinstance(action, Forward) else Forward(0, action.chunk)],
    ]
    actions[position : position + 1] = data.draw(st.sampled_from(mutants))
    with pytest.raises(ScheduleError):
        check(schedules, shape)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(shapes(), st.data())
def test_two_swapped_actions_are_detected_or_harmless(shape: Shape, data: Any) -> None:
    schedules = all_stages(shape)
    actions = schedules[data.draw(st.integers(0, shape[1] - 1))]
    positions = st.integers(0, len(actions) - 1)
    first, second = data.draw(positions), data.draw(positions)
    actions[first], actions[second] = actions[second], actions[first]
    try:
        check(schedules, shape)
    except ScheduleError:
        return
    # what the checker accepts completes, with strict waits and with waits on use, and does the same work
    for waits_on_use in (True, False):
        assert simulate(schedules, waits_on_use=waits_on_use).busy == simulate(all_stages(shape)).busy


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(shapes(least_stages=2), st.data())
def test_the_checker_agrees_with_a_plain_search_for_deadlock(shape: Shape, data: Any) -> None:
    """Splits exchanges into single messages in a drawn order; a slow, obvious simulation must give the same verdict."""
    kind, stages, micro_batches, chunks = shape
    shape = (kind, min(stages, 4), min(micro_batches, 5), chunks)
    split: List[List[Action]] = []
    sends_first = data.draw(st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]))
    for first, actions in zip(sends_first, all_stages(shape)):
        split.append([])
        for action in actions:
            if not isinstance(action, Exchange):
                split[-1].append(action)
                continue
            sends: List[Action] = [Exchange((message,), ()) for message in action.sends]
            receives: List[Action] = [Exchange((), (message,)) for message in action.receives]
            split[-1] += sends + receives if first else receives + sends
    assert _finishes(split) == _passes(split, shape)


def _passes(schedules: List[List[Action]], shape: Shape) -> bool:
    try:
        check(schedules, shape)
    except ScheduleError as error:
        assert "deadlock" in str(error)
        return False
    return True


def _finishes(schedules: List[List[Action]]) -> bool:
    """Returns whether exchanges of one message each all complete: sends meet receives at the heads of their lists."""
    lists = [[a for a in actions if isinstance(a, Exchange)] for actions in schedules]
    has_progress = True
    while has_progress:
        has_progress = False
        for stage, actions in enumerate(lists):
            if not actions or not actions[0].sends:
                continue
            message = actions[0].sends[0]
            peer_actions = lists[message.peer]
            if peer_actions and peer_actions[0].receives == (replace(message, peer=stage),):
                del actions[0], peer_actions[0]
                has_progress = True
    return not any(lists)


def test_a_deadlock_that_buffered_sends_would_hide_is_detected_and_located() -> None:
    """1F1B with each send before the next receive: fine while MPI buffers messages, stuck as soon as it does not."""
    schedules: List[List[Action]] = [
        [
            Forward(0, 0),
            Exchange((Message("activation", 0, 1, 1),), ()),
            Forward(1, 0),
            Exchange((Message("activation", 1, 1, 1),), ()),
            Exchange((), (Message("gradient", 0, 0, 1),)),
            BackwardInput(0, 0),
            Exchange((), (Message("gradient", 1, 0, 1),)),
            BackwardInput(1, 0),
        ],
        [
            Exchange((), (Message("activation", 0, 1, 0),)),
            Forward(0, 1),
            BackwardInput(0, 1),
            Exchange((Message("gradient", 0, 0, 0),), ()),
            Exchange((), (Message("activation", 1, 1, 0),)),
            Forward(1, 1),
            BackwardInput(1, 1),
            Exchange((Message("gradient", 1, 0, 0),), ()),
        ],
    ]
    with pytest.raises(ScheduleError, match="deadlock.*stage 0 at action 3: sends activation.*stage 1 at action 3"):
        check_schedules(schedules, 2)
    schedules[0][3:5] = [Exchange((Message("activation", 1, 1, 1),), (Message("gradient", 0, 0, 1),))]
    check_schedules(schedules, 2)


def test_overtaking_messages_are_detected() -> None:
    schedules = all_stages(("gpipe", 2, 2, 1))
    first, second = (p for s, p, a in _exchanges(schedules) if s == 1 and a.receives)
    earlier, later = schedules[1][first], schedules[1][second]
    assert isinstance(earlier, Exchange) and isinstance(later, Exchange)
    schedules[1][first] = Exchange((), later.receives + earlier.receives)
    schedules[1][second] = Exchange((), ())
    with pytest.raises(ScheduleError, match="not in the order"):
        check_schedules(schedules, 2)


def test_simulating_a_schedule_that_deadlocks_is_refused() -> None:
    schedules = all_stages(("1f1b", 2, 2, 1))
    schedules[0] = [action for action in schedules[0] if not isinstance(action, Exchange)]
    for waits_on_use in (True, False):
        with pytest.raises(ValueError, match="waits for ever"):
            simulate(schedules, waits_on_use=waits_on_use)
