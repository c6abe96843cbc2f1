"""Tests of the search for the edge of memory: for any outcome of trials it ends, soon, with a batch that was tried."""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Mapping, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.sweep.edge_search import (
    Verdict,
    candidate_batches,
    largest_that_fits,
    next_trial,
    next_trial_for_rate,
)

VERDICTS = st.sampled_from(list(Verdict))


def search(
    count: int, guess: int, outcome: Callable[[int], Verdict], earlier: Optional[Mapping[int, Verdict]] = None
) -> Dict[int, Verdict]:
    """The trials of a whole search, earlier ones included; none is made twice."""
    trials = dict(earlier or {})
    while True:
        index = next_trial(count, guess, trials)
        if index is None:
            return trials
        assert 0 <= index < count and index not in trials
        trials[index] = outcome(index)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 400), st.data())
def test_a_monotone_edge_takes_few_trials(count: int, data: st.DataObject) -> None:
    edge = data.draw(st.integers(-1, count - 1))
    guess = data.draw(st.integers(-1, count))
    kind = data.draw(st.sampled_from([Verdict.NO_MEMORY, Verdict.BROKEN]))
    trials = search(count, guess, lambda index: Verdict.FITS if index <= edge else kind)
    assert largest_that_fits(trials) == edge
    off = abs(min(max(guess, 0), count - 1) - edge)
    bound = 3 + 2 * math.log2(off + 1) if kind is Verdict.NO_MEMORY else 3 + 2 * math.log2(count + 1)
    assert len(trials) <= bound


@settings(max_examples=120, deadline=None)
@given(st.lists(VERDICTS, min_size=1, max_size=60), st.data())
def test_any_outcome_ends_at_an_edge_that_was_tried_on_both_sides(outcomes: List[Verdict], data: st.DataObject) -> None:
    count = len(outcomes)
    guess = data.draw(st.integers(-1, count))
    recorded = data.draw(st.sets(st.integers(0, count - 1), max_size=8))  # by calls with other guesses
    earlier = {index: outcomes[index] for index in recorded}
    trials = search(count, guess, outcomes.__getitem__, earlier)
    largest = largest_that_fits(trials)
    assert largest == -1 or outcomes[largest] is Verdict.FITS
    assert largest == count - 1 or trials[largest + 1] is not Verdict.FITS
    assert len(trials) - len(earlier) <= 5 + 2 * math.log2(count + 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(-1, 199), st.integers(0, 199), st.integers(0, 12))
def test_a_stopped_search_continues_as_if_it_had_not_been(count: int, edge: int, guess: int, stop: int) -> None:
    def outcome(index: int) -> Verdict:
        return Verdict.FITS if index <= edge else Verdict.NO_MEMORY

    complete = search(count, guess, outcome)
    begun = dict(list(complete.items())[:stop])
    assert search(count, guess, outcome, begun) == complete


def test_a_right_guess_takes_two_trials_and_a_neighbor_three() -> None:
    def trials(guess: int) -> int:
        return len(search(100, guess, lambda index: Verdict.FITS if index <= 40 else Verdict.NO_MEMORY))

    assert [trials(guess) for guess in (39, 40, 41)] == [3, 2, 2]


def test_after_a_broken_run_the_smallest_batch_is_next() -> None:
    assert list(search(100, 40, lambda _: Verdict.BROKEN)) == [40, 0]
    assert list(search(100, 40, lambda _: Verdict.NO_MEMORY)) == [40, 39, 38, 36, 32, 24, 8, 0]


@pytest.mark.parametrize("most", [1, 2, 16, 17, 33, 100, 1024])
def test_candidates_are_spaced_by_an_eighth_at_most_and_end_at_the_largest(most: int) -> None:
    batches = candidate_batches(most)
    assert batches[0] == 1 and batches[-1] == most
    assert all(0 < after - before <= max(1, before // 8) for before, after in zip(batches, batches[1:]))
    assert candidate_batches(most, is_exact=True) == list(range(1, most + 1))
    assert len(candidate_batches(1024)) == 64 and 144 in candidate_batches(1024)


def rate_search(
    batches: List[int], largest: int, rate: Callable[[int], Optional[float]], full: bool = False
) -> List[int]:
    """The batches that are tried for the rate, after the largest, in order."""
    rates = {largest: rate(batches[largest])}
    while True:
        index = next_trial_for_rate(batches, largest, rates, full)
        if index is None:
            return [batches[tried] for tried in rates][1:]
        assert index not in rates and 0 <= index < largest
        rates[index] = rate(batches[index])


def test_halves_are_tried_as_long_as_they_are_faster() -> None:
    batches = candidate_batches(200)
    largest = batches.index(144)
    assert rate_search(batches, largest, lambda batch: 1.0 + batch) == [128]
    assert rate_search(batches, largest, lambda batch: 1.0 / batch) == [128, 64, 32, 16, 8, 4, 2, 1]
    assert rate_search(batches, largest, lambda batch: -abs(batch - 64.0) + 200) == [128, 64, 32]
    assert rate_search(batches, largest, lambda batch: None if batch == 128 else 1.0 / batch) == [128]  # it has failed
    assert rate_search(batches, largest, lambda batch: 1.0 + batch, full=True) == [128, 64, 32, 16, 8, 4, 2, 1]
    assert rate_search(batches, batches.index(128), lambda batch: 1.0 + batch) == [64]
    assert rate_search(batches, 0, lambda batch: 1.0) == []
    assert rate_search(batches, largest, lambda batch: 1.0) == [128]  # no faster


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.dictionaries(st.integers(1, 600), st.none() | st.floats(0.1, 10)), st.booleans())
def test_the_search_for_the_rate_ends_within_the_powers_of_two(
    most: int, rates: Dict[int, Optional[float]], full: bool
) -> None:
    batches = candidate_batches(most, is_exact=True)
    tried = rate_search(batches, most - 1, lambda batch: rates.get(batch, 1.0), full)
    assert tried == sorted(tried, reverse=True) and all(batch & (batch - 1) == 0 for batch in tried)
    assert len(tried) <= math.log2(most) + 1
