"""The learning rate over the iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.training.schedule import learning_rate


def test_warm_up_rises_to_the_peak_and_the_cosine_falls_to_the_end() -> None:
    training = TrainingConfig(lr=1.0, min_lr=0.1, warmup_iterations=10, iterations=110)
    assert learning_rate(training, 0) == pytest.approx(0.1)
    assert learning_rate(training, 9) == learning_rate(training, 10) == pytest.approx(1.0)
    assert learning_rate(training, 60) == pytest.approx(0.55)  # half way down the cosine
    assert learning_rate(training, 110) == learning_rate(training, 10_000) == pytest.approx(0.1)


def test_the_length_of_the_schedule_may_differ_from_the_run_s() -> None:
    training = TrainingConfig(lr=1.0, min_lr=0.0, iterations=10, decay_iterations=1000)
    assert learning_rate(training, 9) > 0.99


@given(
    warmup=st.integers(0, 50), length=st.integers(51, 500), iteration=st.integers(0, 600), low=st.floats(0, 1, width=32)
)
def test_it_stays_between_its_bounds_and_moves_in_small_steps(
    warmup: int, length: int, iteration: int, low: float
) -> None:
    training = TrainingConfig(lr=1.0, min_lr=low, warmup_iterations=warmup, iterations=length)
    rate, following = learning_rate(training, iteration), learning_rate(training, iteration + 1)
    assert (0 < rate <= 1) if iteration < warmup else (low - 1e-12 <= rate <= 1)
    longest = max(1 / warmup if warmup else 0, 3.15 / 2 / (length - warmup), 1e-9)
    assert abs(following - rate) <= longest + 1e-9
