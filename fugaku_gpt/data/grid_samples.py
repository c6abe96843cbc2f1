"""Numbered samples of grids, as a pure function of (seed, number), in batches of one size of grid.

Grids are sorted into buckets by their longer side. Each global batch is of one bucket: buckets take turns in proportion
to their grids (``blend.py``), and the grids of a bucket are permuted anew in each epoch. A training grid may be turned,
reflected and given other colors, by draws that belong to its number, so that every layout sees the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import COLORS, DataConfig
from fugaku_gpt.data.blend import Blend
from fugaku_gpt.data.grids import Grid, check_split, grids_up_to, open_grids, split_grids
from fugaku_gpt.data.permutation import permutation, permuted_index, stream_key
from fugaku_gpt.data.sample_checks import NoSamples
from fugaku_gpt.data.samples import SPLITS
from fugaku_gpt.errors import DataError


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


@dataclass(frozen=True)
class GridSplits:
    """The samples of the splits of one set of tasks.

    Attributes:
        samples: by split.
        tasks, grids: number of tasks, and of their grids.
        left_out: number of grids that are larger than the last bucket.
        tasks_without_grids: number of tasks whose grids are all left out.
        largest: side of the last bucket.
    """

    samples: Mapping[str, "GridSamples"]
    tasks: int
    grids: int
    left_out: int
    tasks_without_grids: int
    largest: int

    def summary(self) -> str:
        """How many grids each split has, and how many none has, in one line."""
        counts = ", ".join(f"{sum(samples.counts)} in {split}" for split, samples in self.samples.items())
        line = f"grids: {counts}, of {self.grids} of {self.tasks} tasks"
        if self.left_out:
            line += f"; left out: {self.left_out} larger than {self.largest} x {self.largest}"
        if self.tasks_without_grids:
            line += f"; tasks without grids: {self.tasks_without_grids}"
        return line


def open_grid_samples(config: RunConfig, split: str) -> "GridSamples":
    """Open the grids of one split; see :func:`open_grid_splits`."""
    return open_grid_splits(config, (split,)).samples[split]


def open_grid_splits(config: RunConfig, splits: Sequence[str]) -> GridSplits:
    """Open the grids of some splits (``train``, ``valid``, ``test``) of a run's tasks, which are read once.

    Grids that no bucket holds are left out before the rest is divided, so that the shares are of what is used.

    Raises:
        NoSamples: a split has no grid.
        DataError: as :func:`fugaku_gpt.data.grids.open_grids` and :func:`fugaku_gpt.data.grids.check_split`; or there
            are more tasks than ``model.classes``.
    """
    data, model, training = config.data, config.model, config.training
    grids, largest = open_grids(data.paths), data.buckets[-1]
    if len(grids.tasks) > model.classes:
        raise DataError(
            f"data.paths: {len(grids.tasks)} tasks, more than model.classes {model.classes}; "
            f"valid: --set model.classes={len(grids.tasks)}"
        )
    check_split(grids, data.split)
    fitting = grids_up_to(grids, largest)
    count = sum(map(len, grids.grids))
    left_out = count - sum(map(len, fitting.grids))
    parts = dict(zip(SPLITS, split_grids(fitting, data.split)))
    samples = {}
    for split in splits:
        augmentation = Augmentation.of(data) if split == "train" else Augmentation()
        facts: Tuple[Any, ...] = (grids.fingerprint, data.split, data.buckets, augmentation, training.global_batch)
        if left_out:  # earlier versions divided the grids first: their checkpoints have other splits of such a run
            facts = (*facts, "divided without larger grids")
        fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
        key = stream_key(training.seed, split, "grids")
        samples[split] = GridSamples(parts[split], data.buckets, training.global_batch, key, augmentation, fingerprint)
        if not any(samples[split].counts):
            raise NoSamples(
                f"data.split {list(data.split)}: the {split} split has no grid of at most {largest} x {largest} cells; "
                "valid: a share above 0, or larger data.buckets"
            )
    return GridSplits(samples, len(grids.tasks), count, left_out, fitting.grids.count(()), largest)


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

    def has_fingerprint(self, recorded: str) -> bool:
        """Whether a recorded fingerprint is that of these samples."""
        return recorded == self.fingerprint

    def cells(self, number: int) -> int:
        """Cells of the samples of the global batch that has this one, padding included."""
        bucket, _ = self._blend.locate(number // self._batch)
        return self._used[bucket][0] ** 2

    def distinct(self, cells: int, count: int) -> int:
        """How many different grids the first ``count`` samples of a bucket with this many cells are: they begin anew
        once each has come."""
        of_side = next(grids for side, grids in self._used if side * side == cells)
        return min(count, len(of_side))

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
