"""Chooses the next token from logits, by random numbers that depend on the prompt and the position alone.

So a text does not depend on the layout of ranks, on the other prompts of a batch, or on what was generated before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Sequence

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 chooses the most probable token.
        top_k: only this many of the most probable tokens can be chosen; None: all.
        top_p: only the fewest tokens whose probabilities add up to this can be chosen (Holtzman et al. 2020, "The
            Curious Case of Neural Text Degeneration", section 3.1).
        repetition_penalty: makes tokens that the text already has less probable: positive logits are divided by it,
            negative ones multiplied (Keskar et al. 2019, "CTRL", section 4.1).
        seed: another seed gives another text.
    """

    temperature: float = 0.0
    top_k: Optional[int] = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def next_token(
        self, logits: "np.ndarray[tuple[int], np.dtype[np.float64]]", ids: Sequence[int], prompt: int
    ) -> int:
        """Choose the token that follows ``ids``.

        Args:
            logits: [vocabulary] of the next token, float64.
            ids: the prompt and what was generated.
            prompt: number of the prompt, which keys the random number, as the length of ``ids`` does.
        """
        if self.repetition_penalty != 1.0:
            logits = logits.copy()
            present = np.unique(np.asarray(ids))
            values = logits[present]
            logits[present] = np.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        if self.temperature == 0.0:
            return int(np.argmax(logits))
        candidates = np.arange(len(logits))
        if self.top_k is not None and self.top_k < len(logits):  # without sorting all of a large vocabulary
            candidates = np.flatnonzero(logits >= np.partition(logits, -self.top_k)[-self.top_k])
        # the most probable first, of equal ones the first in the vocabulary
        order = candidates[np.argsort(-logits[candidates], kind="stable")][: self.top_k]
        weights = np.exp((logits[order] - logits[order[0]]) / self.temperature)
        sums = np.cumsum(weights)
        if self.top_p < 1.0:
            count = int(np.searchsorted(sums, self.top_p * sums[-1])) + 1
            order, sums = order[:count], sums[:count]
        chosen = np.searchsorted(sums, uniform(self.seed, prompt, len(ids)) * sums[-1], side="right")
        return int(order[min(int(chosen), len(order) - 1)])


def uniform(seed: int, prompt: int, position: int) -> float:
    """Return a number in [0, 1) for a position of a prompt's text, by the counter of a Philox generator (Salmon et al.
    2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    generator = np.random.Philox(key=((prompt & (2**64 - 1)) << 64) | (seed & (2**64 - 1)), counter=position)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
