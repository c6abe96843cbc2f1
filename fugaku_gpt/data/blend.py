"""Which corpus a sample comes from: a pure function of its number and the weights, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import List, Sequence, Tuple


class Blend:
    """Corpora mixed by weight, evenly: of the first n samples, corpus i has its share n * weight, give or take a few.

    The first corpus takes every sample at which floor(n * weight) grows; the samples left over are numbered anew and
    the second takes its share of those, and so on. So no table of past choices is needed, for any n.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        rest = sum(exact, Fraction(0))
        self._shares: List[Fraction] = []
        for weight in exact[:-1]:
            self._shares.append(weight / rest)
            rest -= weight

    def locate(self, number: int) -> Tuple[int, int]:
        """(corpus, number of the sample among that corpus's own) of a sample."""
        for corpus, share in enumerate(self._shares):
            before = number * share.numerator // share.denominator
            after = (number + 1) * share.numerator // share.denominator
            if after > before:
                return corpus, before
            number -= before
        return len(self._shares), number
