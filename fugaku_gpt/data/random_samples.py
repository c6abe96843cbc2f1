"""Samples of random tokens or grids, which depend on the number of the first sample alone."""

from __future__ import annotations

from typing import Any, Union

import numpy as np

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import COLORS
from fugaku_gpt.data.grid_samples import GridBatch
from fugaku_gpt.data.packed_batch import PackedBatch

MEAN_DOCUMENT = 200  # tokens


class RandomSamples:
    """An endless source of numbered samples, with a run's sequence length and vocabulary."""

    def __init__(self, config: RunConfig) -> None:
        self._length, self._vocab_size = config.model.seq_len + 1, config.model.vocab_size

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[count, seq_len + 1] token ids of the samples from ``first``."""
        return np.random.RandomState(first).randint(0, self._vocab_size, size=(count, self._length), dtype="int64")

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        """The same, with documents that begin with every token by the same chance: their lengths are those of a
        geometric distribution."""
        tokens = self.batch(first, count)
        chances = np.random.RandomState([first, MEAN_DOCUMENT]).random_sample(tokens.shape)
        return PackedBatch(tokens, chances < 1 / MEAN_DOCUMENT)


def random_samples(config: RunConfig) -> Union[RandomSamples, "RandomGrids"]:
    """Return the random samples that the model of a run takes."""
    return RandomGrids(config) if config.model.is_grid_classifier else RandomSamples(config)


class RandomGrids:
    """An endless source of numbered grids of random colors, of a run's largest size, and of random classes."""

    def __init__(self, config: RunConfig) -> None:
        self._side, self._classes = config.model.grid_side, config.model.classes

    def cells(self, number: int) -> int:
        """Cells of each sample."""
        return self._side**2

    def distinct(self, cells: int, count: int) -> int:
        """How many different grids ``count`` samples are: all, but for a chance."""
        return count

    def batch(self, first: int, count: int) -> GridBatch:
        """Return the grids from ``first``, whose sides are from half the largest to the largest."""
        random = np.random.RandomState(first)
        colors = random.randint(0, COLORS, size=(count, self._side**2), dtype="int64")
        sides = random.randint((self._side + 1) // 2, self._side + 1, size=(2, count), dtype="int64")
        colors[np.arange(self._side**2) >= sides.prod(0)[:, np.newaxis]] = 0
        return GridBatch(colors, random.randint(0, self._classes, size=count, dtype="int64"), *sides)
