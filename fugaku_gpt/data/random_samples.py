"""Samples of random tokens, which depend on the number of the first sample alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from fugaku_gpt.config import RunConfig


class RandomSamples:
    """An endless source of numbered samples, with a run's sequence length and vocabulary."""

    def __init__(self, config: RunConfig) -> None:
        self._length, self._vocab_size = config.model.seq_len + 1, config.model.vocab_size

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[count, seq_len + 1] token ids of the samples from ``first``."""
        return np.random.RandomState(first).randint(0, self._vocab_size, size=(count, self._length), dtype="int64")
