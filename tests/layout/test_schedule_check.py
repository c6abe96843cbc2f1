"""Tests of what the checker of schedules says of small schedules that are wrong in one way."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from fugaku_gpt.layout.schedule_check import ScheduleError, check_schedules
from fugaku_gpt.layout.schedules import Action, BackwardInput, BackwardWeight, Exchange, Forward, Message

F, B, W = Forward, BackwardInput, BackwardWeight
ACTIVATION, GRADIENT = Message("activation", 0, 1, 1), Message("gradient", 0, 0, 1)  # of stage 0, to and from stage 1
SEND, RECEIVE = Exchange((ACTIVATION,), ()), Exchange((), (GRADIENT,))
FIRST: Tuple[Action, ...] = (F(0, 0), SEND, RECEIVE, B(0, 0))
LAST: Tuple[Action, ...] = (
    Exchange((), (Message("activation", 0, 1, 0),)), F(0, 1), B(0, 1), Exchange((Message("gradient", 0, 0, 0),), ())
)  # fmt: skip


@pytest.mark.parametrize(
    ("actions", "problem"),
    [
        ([F(0, 1)], "stage 0, action 0: .*is not this stage's"),
        ([F(0, -1)], "stage 0, action 0: .*is not this stage's"),
        ([F(0, 0), F(2, 0)], "stage 0, action 1: .*there are 2 micro-batches"),
        ([F(-1, 0)], "there are 2 micro-batches"),
        ([F(0, 0), F(0, 0)], "stage 0, action 1: .*is done already"),
        ([F(0, 0), F(1, 0), B(1, 0), B(1, 0)], "stage 0, action 3: .*is done already"),
        ([F(0, 0), B(1, 0)], "stage 0, action 1: .*its forward pass is not done"),
        ([F(0, 0), F(1, 0), W(0, 0)], "stage 0, action 2: .*its backward pass is not done"),
        ([F(0, 0), B(0, 0)], "stage 0, action 2: 1 forward passes are done; 2 are needed"),
        ([F(0, 0), F(1, 0), B(0, 0)], "stage 0, action 3: 1 backward passes are done; 2 are needed"),
        ([F(0, 0), F(1, 0), B(0, 0), W(0, 0), B(1, 0)], "1 gradients of weights are made; 2 are needed"),
    ],
)
def test_a_single_stage(actions: List[Action], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        check_schedules([actions], 2)


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ([F(0, 1)], "is not this stage's"),  # a chunk of the other stage
        ([F(0, 0), Exchange((Message("activation", 0, 1, 2),), ())], "there is no such other stage"),
        ([F(0, 0), Exchange((Message("activation", 0, 1, -1),), ())], "there is no such other stage"),
        ([F(0, 0), Exchange((Message("activation", 0, 1, 0),), ())], "there is no such other stage"),
        ([SEND], "which is not there to send"),
        ([F(0, 0), SEND, SEND], "stage 0, action 2: sends .*which is not there to send"),
        ([F(0, 0), SEND, RECEIVE, RECEIVE], "stage 0, action 3: receives .*a second time"),
        ([F(0, 0), SEND, RECEIVE, B(0, 0), RECEIVE], "stage 0, action 4: receives .*a second time"),
        ([F(0, 0), SEND, B(0, 0)], "stage 0, action 2: .*its gradient is not there"),
        ([RECEIVE, F(0, 0), B(0, 0)], "stage 0, action 3: activation of micro-batch 0 for chunk 1 is never sent"),
    ],
)
def test_the_first_of_two_stages(first: List[Action], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        check_schedules([first, LAST], 1)


def test_messages_that_arrive_are_used() -> None:
    further = Exchange((), (Message("gradient", 1, 0, 1),))
    with pytest.raises(ScheduleError, match="gradient of micro-batch 1 for chunk 0 is never used"):
        check_schedules([[*FIRST, further], LAST], 1)


def test_a_right_schedule_is_counted() -> None:
    report = check_schedules([FIRST, LAST], 1)
    assert (report.actions, report.messages) == (8, 2)
    assert report.peak_in_flight == report.peak_arrived == report.peak_retained == (1, 1)
    report = check_schedules([[F(0, 0), F(1, 0), B(0, 0), B(1, 0), W(0, 0), W(1, 0)]], 2)
    assert (report.actions, report.messages) == (6, 0)
    assert (report.peak_in_flight, report.peak_arrived, report.peak_retained) == ((2,), (0,), (2,))
    report = check_schedules([[F(0, 0), B(0, 0), F(1, 0), B(1, 0), W(0, 0), W(1, 0)]], 2)
    assert (report.peak_in_flight, report.peak_retained) == ((1,), (2,))
