"""Searches for the largest batch that fits into memory, with few trials, each of which is a whole run.

The search is a function of the trials that are there, not of a state: a search that was killed continues with its
recorded trials. It ends for any outcome of the trials, also where a larger batch fits and a smaller one does not, and
with any trials of earlier searches. At its end the largest batch that fits has been tried, and the next candidate above
it has been tried and does not fit, or there is none.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum
from typing import List, Mapping, Optional, Sequence

_EXACT_UP_TO = 16  # below it, every batch is a candidate; above it, eight of each doubling


class Verdict(Enum):
    """How a trial has ended, as far as it decides which batch is tried next."""

    FITS = "fits"
    NO_MEMORY = "no memory"
    BROKEN = "broken"  # refused, failed or hung: smaller batches are likely to end so, too


def candidate_batches(most: int, is_exact: bool = False) -> List[int]:
    """The batches that a search may try, ascending: 1, 2, ..., 16, 18, ..., 32, 36, and so on up to ``most``.

    Neighbours are at most an eighth of the smaller one apart, or 1. ``most`` is always a candidate.

    Args:
        is_exact: every whole number is a candidate.
    """
    if is_exact:
        return list(range(1, most + 1))
    batches = list(range(1, min(most, _EXACT_UP_TO) + 1))
    step = 2
    while batches[-1] < most:
        batches.append(min(most, batches[-1] + step))
        if batches[-1] == 16 * step:
            step *= 2
    return batches


def largest_that_fits(verdicts: Mapping[int, Verdict]) -> int:
    """The largest candidate that was tried and fits, by its index; -1 if none does."""
    return max((index for index, verdict in verdicts.items() if verdict is Verdict.FITS), default=-1)


def next_trial(count: int, guess: int, verdicts: Mapping[int, Verdict]) -> Optional[int]:
    """The candidate to try next, by its index; None at the end of the search.

    The first is the guess. From there the search goes up while trials fit, and down while they do not, by steps that
    double; then it halves the gap. After a trial that has ended for another reason than memory, it goes down to the
    smallest candidate at once.

    Args:
        count: number of candidates.
        guess: index of the candidate that is expected to be the largest that fits.
        verdicts: index → how its trial has ended, in any order.
    """
    low = largest_that_fits(verdicts)
    high = min((index for index in verdicts if index > low), default=count)
    if high - low <= 1:
        return None
    guess = min(max(guess, 0), count - 1)
    if low < guess < high:
        return guess if high == count or low == -1 else _middle(low, high)
    if high == count:
        return min(low + max(1, low - guess), count - 1)
    if low == -1:
        is_broken = verdicts[high] is Verdict.BROKEN
        return 0 if is_broken else max(high - max(1, guess - high), 0)
    return _middle(low, high)


def next_trial_for_rate(
    batches: Sequence[int], largest: int, rates: Mapping[int, Optional[float]], is_full_curve: bool = False
) -> Optional[int]:
    """The candidate to try next for the best rate, once the largest that fits is known; None at the end.

    These are the powers of two below the largest, in descending order, as long as the last one was faster than all
    larger ones: the largest batch is not always the fastest.

    Args:
        largest: index of the largest candidate that fits.
        rates: index → rate of its trial; None where it has none, since it did not end well.
        is_full_curve: all powers of two are tried.
    """
    limit = 2 ** (batches[largest].bit_length() - 1)
    power = limit if limit < batches[largest] else limit // 2
    while power >= 1:
        index = bisect_right(batches, power) - 1
        if index not in rates:
            return index
        larger = [rate for other, rate in rates.items() if index < other <= largest and rate is not None]
        rate = rates[index]
        if not is_full_curve and (rate is None or rate <= max(larger, default=0.0)):
            return None
        power //= 2
    return None


def _middle(low: int, high: int) -> int:
    return (low + high) // 2
