"""Numbered samples of grids, as a pure function of (seed, number), in batches of one size of grid.

Grids are sorted into buckets by their longer side. Each global batch is of one bucket: buckets take turns in proportion
to their grids (``blend.py``), and the grids of a bucket are permuted anew in each epoch. A training grid may be turned,
reflected and given other colors, by draws that belong to its number, so that every layout sees the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import DataConfig
from fugaku_gpt.data.blend import Blend
from fugaku_gpt.data.grids import COLORS, Grid, open_grids, split_grids
from fugaku_gpt.data.permutation import permutation, permuted_index, stream_key
from fugaku_gpt.errors import DataError

_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class GridBatch:
    """Consecutive grids of one bucket, padded to its cells.

    Attributes:
        colors: int64 [b, cells]: the cells of each grid row after row, then padding of color 0.
        labels, heights, widths: int64 [b].
    """

    colors: "np.ndarray[Any, np.dtype[np.int64]]"
    labels: "np.ndarray[Any, np.dtype[np.int64]]"
    heights: "np.ndarray[Any, np.dtype[np.int64]]"
    widths: "np.ndarray[Any, np.dtype[np.int64]]"

    @property
    def cells(self) -> int:
        """Cells of each sample, padding included."""
        return self.colors.shape[1]


def open_grid_samples(config: RunConfig, split: str) -> "GridSamples":
    """Open the grids of one split (``train``, ``valid`` or ``test``) of a run's tasks.

    Raises:
        DataError: as :func:`fugaku_gpt.data.grids.open_grids`; there are more tasks than ``model.classes``; or the
            split has no grid that fits the largest bucket.
    """
    data, model = config.data, config.model
    grids = open_grids(data.paths)
    if len(grids.tasks) > model.classes:
        raise DataError(
            f"data.paths: {len(grids.tasks)} tasks, more than model.classes {model.classes}; "
            f"valid: --set model.classes={len(grids.tasks)}"
        )
    chosen = split_grids(grids, data.split)[_SPLITS.index(split)]
    augmentation = Augmentation.of(data) if split == "train" else Augmentation()
    training = config.training
    facts = (grids.fingerprint, data.split, data.buckets, augmentation, training.global_batch)
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    key = stream_key(training.seed, split, "grids")
    samples = GridSamples(chosen, data.buckets, training.global_batch, key, augmentation, fingerprint)
    if not any(samples.counts):
        raise DataError(
            f"data.split {list(data.split)}: the {split} split has no grid of at most {data.buckets[-1]} x "
            f"{data.buckets[-1]} cells; valid: a share above 0, or larger data.buckets"
        )
    return samples


@dataclass(frozen=True)
class Augmentation:
    """Changes of each grid by chance; see the fields of ``data``."""

    rotations: bool = False
    reflections: bool = False
    permute_colors: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> "Augmentation":
        """The augmentation of a run's training grids."""
        return cls(data.rotations, data.reflections, data.permute_colors)

    def apply(self, colors: "np.ndarray[Any, np.dtype[np.int64]]", key: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return a grid [height, width] after the draws of ``key``, which has its longer side in any case."""
        if self == Augmentation():
            return colors
        turns, reflects = (int(draw) for draw in np.random.Philox(key=key).random_raw(2))
        if self.rotations:
            colors = np.rot90(colors, turns >> 62)
        if self.reflections and reflects >> 63:
            colors = colors[:, ::-1]
        if self.permute_colors:
            table = np.concatenate([[0], 1 + permutation(stream_key(key, "colors"), COLORS - 1)])
            colors = table[colors]
        return colors


class GridSamples:
    """The grids of one split, in an endless order.

    Attributes:
        counts: number of grids in each bucket.
        fingerprint: SHA-256 over the grids and all that their order depends on but the seed.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        buckets: Sequence[int],
        global_batch: int,
        key: int,
        augmentation: Augmentation,
        fingerprint: str = "",
    ) -> None:
        """Sort ``grids`` into ``buckets``, sides of grids; those that are larger than the last are left out. ``key`` is
        that of the random numbers."""
        sides = np.searchsorted(np.asarray(buckets), [max(grid.colors.shape) for grid in grids])
        found: List[Tuple[int, List[Grid]]] = [
            (side, [grid for grid, bucket in zip(grids, sides) if bucket == number])
            for number, side in enumerate(buckets)
        ]
        self.counts = tuple(len(of_bucket) for _, of_bucket in found)
        self.fingerprint = fingerprint
        self._used = [(side, of_bucket) for side, of_bucket in found if of_bucket]
        self._blend = Blend([float(len(of_bucket)) for _, of_bucket in self._used] or [1.0])
        self._batch = global_batch
        self._key = key
        self._augmentation = augmentation

    def cells(self, number: int) -> int:
        """Cells of the samples of the global batch that has this one, padding included."""
        bucket, _ = self._blend.locate(number // self._batch)
        return self._used[bucket][0] ** 2

    def batch(self, first: int, count: int) -> GridBatch:
        """Return samples [first, first + count), which must lie in one global batch; numbers have no end."""
        turn, offset = divmod(first, self._batch)
        if offset + count > self._batch:
            raise ValueError(f"samples {first} to {first + count - 1} are in two batches of {self._batch}")
        bucket, turns_before = self._blend.locate(turn)
        side, grids = self._used[bucket]
        start = turns_before * self._batch + offset
        chosen = [self._sample(bucket, grids, number) for number in range(start, start + count)]
        colors = np.zeros((count, side * side), dtype=np.int64)
        for row, (of_grid, _) in zip(colors, chosen):
            row[: of_grid.size] = of_grid.reshape(-1)
        heights, widths = np.array([of_grid.shape for of_grid, _ in chosen], dtype=np.int64).T
        return GridBatch(colors, np.array([label for _, label in chosen], dtype=np.int64), heights, widths)

    def _sample(
        self, bucket: int, grids: Sequence[Grid], number: int
    ) -> "Tuple[np.ndarray[Any, np.dtype[np.int64]], int]":
        """Return the colors [height, width] and the label of a bucket's sample."""
        epoch, place = divmod(number, len(grids))
        grid = grids[permuted_index(stream_key(self._key, bucket, epoch), len(grids), place)]
        return self._augmentation.apply(grid.colors, stream_key(self._key, bucket, number, "augmentation")), grid.label
