"""Blends corpora: maps the number of a sample to a corpus, as a pure function of the weights in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import List, Sequence, Tuple


class Blend:
    """Corpora mixed evenly by weight: among the first n samples, corpus i has about n * weight samples.

    The first corpus takes every sample at which floor(n * weight) grows. The remaining samples are renumbered and the
    second corpus takes its share of those, and so on. So no table of earlier choices is needed, for any n.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact_weights = [Fraction(weight) for weight in weights]
        remaining_weight = sum(exact_weights, Fraction(0))
        self._shares: List[Fraction] = []
        for weight in exact_weights[:-1]:
            self._shares.append(weight / remaining_weight)
            remaining_weight -= weight

    def counts(self, samples: int) -> List[int]:
        """How many of the first samples are of each corpus."""
        counts = []
        for share in self._shares:
            counts.append(samples * share.numerator // share.denominator)
            samples -= counts[-1]
        return [*counts, samples]

    def locate(self, number: int) -> Tuple[int, int]:
        """The corpus of a sample, and the number of the sample within that corpus."""
        for corpus, share in enumerate(self._shares):
            earlier_samples = number * share.numerator // share.denominator
            samples_with_this = (number + 1) * share.numerator // share.denominator
            if samples_with_this > earlier_samples:
                return corpus, earlier_samples
            number -= earlier_samples
        return len(self._shares), number
