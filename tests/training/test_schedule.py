"""Tests of the learning rate over the iterations."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.config.schema import LR_SCHEDULES
from fugaku_gpt.training.schedule import learning_rate


def test_warm_up_rises_to_the_peak_and_the_cosine_falls_to_the_end() -> None:
    training = TrainingConfig(lr=1.0, min_lr=0.1, warmup_iterations=10, iterations=110)
    assert learning_rate(training, 0) == pytest.approx(0.1)
    assert learning_rate(training, 9) == learning_rate(training, 10) == pytest.approx(1.0)
    assert learning_rate(training, 60) == pytest.approx(0.55)  # half way down the cosine
    assert learning_rate(training, 110) == learning_rate(training, 10_000) == pytest.approx(0.1)


def test_the_cosine_is_that_of_the_paper_but_for_the_last_iteration() -> None:
    training = TrainingConfig(lr=6e-4, min_lr=6e-5, warmup_iterations=7, iterations=100)
    for iteration in range(7, 99):
        cosine = math.cos(math.pi * ((iteration - 7) / 93))
        assert learning_rate(training, iteration) == 6e-5 + 0.5 * (6e-4 - 6e-5) * (1.0 + cosine)
    assert learning_rate(training, 99) == 6e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", LR_SCHEDULES)
@given(warmup=st.integers(0, 20), after=st.integers(2, 60), fraction=st.floats(0.01, 1))
def test_each_schedule_ends_exactly_where_it_should_and_never_rises_after_the_warm_up(
    kind: str, warmup: int, after: int, fraction: float
) -> None:
    length = warmup + after
    training = TrainingConfig(
        lr=3e-4,
        min_lr=1e-5,
        warmup_iterations=warmup,
        iterations=2 * length,
        decay_iterations=length,
        lr_schedule=kind,
        decay_fraction=fraction,
    )
    rates = [learning_rate(training, iteration) for iteration in range(length + 5)]
    assert rates[:warmup] == pytest.approx([3e-4 * (iteration + 1) / warmup for iteration in range(warmup)])
    assert rates[warmup] == pytest.approx(3e-4)
    assert all(later <= earlier for earlier, later in zip(rates[warmup:], rates[warmup + 1 :]))
    assert rates[length - 1 :] == [3e-4 if kind == "constant" else 1e-5] * 6
    assert kind == "constant" or rates[length - 2] > 1e-5


def test_linear_is_a_straight_line() -> None:
    training = TrainingConfig(lr=1.0, min_lr=0.0, iterations=11, lr_schedule="linear")
    assert [learning_rate(training, i) for i in range(11)] == pytest.approx([1 - i / 10 for i in range(11)])


def test_wsd_is_stable_and_decays_in_the_last_fraction() -> None:
    training = TrainingConfig(
        lr=1.0, min_lr=0.2, warmup_iterations=10, iterations=100, lr_schedule="wsd", decay_fraction=0.2
    )
    rates = [learning_rate(training, i) for i in range(100)]
    assert rates[10:80] == [1.0] * 70
    assert rates[80:] == pytest.approx([1.0 - 0.8 * step / 20 for step in range(1, 21)])


def test_a_run_of_a_single_iteration_has_the_highest_rate() -> None:
    for kind in LR_SCHEDULES:
        assert learning_rate(TrainingConfig(lr=1.0, min_lr=0.1, iterations=1, lr_schedule=kind), 0) == 1.0


def test_the_length_of_the_schedule_may_differ_from_the_run_s() -> None:
    training = TrainingConfig(lr=1.0, min_lr=0.0, iterations=10, decay_iterations=1000)
    assert learning_rate(training, 9) > 0.99


@pytest.mark.slow
@given(
    warmup=st.integers(0, 50), length=st.integers(51, 500), iteration=st.integers(0, 600), low=st.floats(0, 1, width=32)
)
@example(warmup=46, length=51, iteration=49, low=0.0)
def test_the_rate_stays_within_bounds_and_changes_in_small_steps(
    warmup: int, length: int, iteration: int, low: float
) -> None:
    training = TrainingConfig(lr=1.0, min_lr=low, warmup_iterations=warmup, iterations=length)
    rate, following = learning_rate(training, iteration), learning_rate(training, iteration + 1)
    assert (0 < rate <= 1) if iteration < warmup else (low - 1e-12 <= rate <= 1)
    period = length - warmup
    last = (1 - math.cos(math.pi * min(1.0, 2 / period))) / 2  # the last iteration makes two steps of the period
    longest = max(1 / warmup if warmup else 0, 3.15 / 2 / period, last)
    assert abs(following - rate) <= longest + 1e-9
