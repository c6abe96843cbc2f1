"""Samples of random tokens: the same numbers for whoever asks for the same samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from fugaku_gpt.config import RunConfig


class RandomSamples:
    """Numbered samples without end, for a run's sequence length and vocabulary."""

    def __init__(self, config: RunConfig) -> None:
        self._length, self._top = config.model.seq_len + 1, config.model.vocab_size

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[count, seq_len + 1] token ids."""
        return np.random.RandomState(first).randint(0, self._top, size=(count, self._length), dtype="int64")
