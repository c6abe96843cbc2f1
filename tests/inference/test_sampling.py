"""Tests of how the next token is chosen."""

from __future__ import annotations

from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.inference.sampling import Sampling, uniform

LOGITS = np.array([0.0, 2.0, -1.0, 1.0, 2.0])


def drawn(sampling: Sampling, logits: "np.ndarray[tuple[int], np.dtype[np.float64]]", count: int) -> List[int]:
    return [sampling.next_token(logits, [0] * number, 0) for number in range(1, count + 1)]


def test_without_temperature_the_most_probable_token_is_chosen_and_the_first_of_equal_ones() -> None:
    assert Sampling().next_token(LOGITS, [3], 0) == 1
    assert drawn(Sampling(temperature=0.8, top_k=1), LOGITS, 20) == [1] * 20


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    counts = np.bincount(drawn(Sampling(temperature=2.0), LOGITS, 4000), minlength=5) / 4000
    expected = np.exp(LOGITS / 2.0) / np.exp(LOGITS / 2.0).sum()
    assert counts == pytest.approx(expected, abs=0.03)


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.integers(1, 12),
    st.floats(0.05, 1.0),
    st.integers(0, 2**70),
)
def test_only_allowed_tokens_are_drawn(values: List[float], top_k: int, top_p: float, seed: int) -> None:
    logits = np.array(values)
    token = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed).next_token(logits, [1], 5)
    order = np.argsort(-logits, kind="stable")
    probabilities = np.exp(logits[order[:top_k]])
    probabilities /= probabilities.sum()
    rank = int(np.flatnonzero(order == token)[0])
    assert rank < top_k
    # those before it do not have the wanted probability yet
    assert probabilities[:rank].sum() <= top_p + 1e-12


def test_a_token_of_the_text_becomes_less_probable() -> None:
    sampling = Sampling(repetition_penalty=4.0)
    logits = LOGITS.copy()
    assert sampling.next_token(logits, [1], 0) == 4
    assert sampling.next_token(logits, [1, 4], 0) == 3
    assert sampling.next_token(np.array([-1.0, -2.0]), [0], 0) == 1
    assert np.array_equal(logits, LOGITS), "the caller's logits are unchanged"


def test_a_random_number_depends_on_seed_prompt_and_position_alone() -> None:
    numbers = {uniform(seed, prompt, position) for seed in (0, 1) for prompt in (0, 1) for position in (0, 1)}
    assert len(numbers) == 8 and all(0 <= number < 1 for number in numbers)
    # the generator is a part of the results: the same everywhere, in every version of NumPy
    assert uniform(1, 2, 3) == 0.6527702009682942
