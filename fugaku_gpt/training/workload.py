"""The workload of a run, tokens or grids: the length of a batch's samples, and the inputs of the model's chunks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Protocol, Sequence, Tuple, Union, cast

import numpy as np
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.grid_samples import GridBatch, open_grid_splits
from fugaku_gpt.data.megatron_samples import MegatronSamples
from fugaku_gpt.data.packed_batch import PackedBatch
from fugaku_gpt.data.samples import SampleSource, open_samples
from fugaku_gpt.layout.batch import SkippedSamples, first_sample, sequence_length
from fugaku_gpt.model.cells import Cells
from fugaku_gpt.model.documents import Documents
from fugaku_gpt.model.gpt import GPT
from fugaku_gpt.parallel.cross_entropy import NO_TARGET
from fugaku_gpt.training.startup import collective_try

TRAIN, VALID = "train", "valid"


class Samples(Protocol):
    """A source of samples, numbered from 0 without end, the same on every rank."""

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return samples [first, first + count) as [count, seq_len + 1] token ids."""


class PackedSamples(Samples, Protocol):
    """Samples that say where documents begin, for runs that keep these apart."""

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        """Return samples [first, first + count), and where their documents begin."""


class GridSource(Protocol):
    """A source of grids, numbered from 0 without end, the same on every rank."""

    def cells(self, number: int) -> int:
        """Return the cells of the grids of the global batch that has a sample, padding included."""

    def distinct(self, cells: int, count: int) -> int:
        """Return how many different grids the first ``count`` samples with this many cells are."""

    def batch(self, first: int, count: int) -> GridBatch:
        """Return samples [first, first + count) of one global batch."""


Source = Union[Samples, GridSource]


class RemainingSamples:
    """The samples that ``training.skip_samples`` does not skip, renumbered without gaps."""

    def __init__(self, samples: Samples, skipped_samples: SkippedSamples) -> None:
        self._samples = samples
        self._skipped_samples = skipped_samples

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return samples as :meth:`Samples.batch` does, by their new numbers."""
        start = self._skipped_samples.number(first)
        if self._skipped_samples.number(first + count - 1) == start + count - 1:
            return self._samples.batch(start, count)
        numbers = [self._skipped_samples.number(used) for used in range(first, first + count)]
        return np.concatenate([self._samples.batch(number, 1) for number in numbers])

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        """Return samples as :meth:`PackedSamples.packed_batch` does, by their new numbers."""
        samples = cast(PackedSamples, self._samples)
        numbers = [self._skipped_samples.number(used) for used in range(first, first + count)]
        batches = [samples.packed_batch(number, 1) for number in numbers]
        return PackedBatch(*(np.concatenate(parts) for parts in zip(*batches)))


class Workload(Protocol):
    """The batches of a run."""

    def has(self, split: str) -> bool:
        """Return whether there are samples of a split."""

    def sequence_length(self, iteration: int, used: int) -> int:
        """Return the length of each training sample of an iteration, which begins after ``used`` samples: its tokens,
        or its cells with padding."""

    def validation_length(self, used: int) -> int:
        """Return the length of each validation sample of the batch after ``used`` samples."""

    def distinct(self, seq_len: int, samples: int) -> int:
        """Return how many different grids the first ``samples`` validation samples of a length are; 0 for tokens."""

    def terms(self, samples: int, seq_len: int) -> int:
        """Return the number of losses that samples of this length have: one for each token, or for each grid. Where
        the first tokens of documents are no targets it is an upper bound."""

    def take_targets(self) -> int:
        """Return how many losses the forward passes on this rank have computed since the last call, where only these
        passes know; else 0."""

    def forward(
        self, chunk: GPT, x: Optional[torch.Tensor], split: str, batch: Tuple[int, int], seq_len: int
    ) -> torch.Tensor:
        """Return what a chunk makes of one micro-batch: hidden states, or the sum of the losses.

        Args:
            x: hidden states of the chunk before; None for the first.
            split: ``TRAIN`` or ``VALID``.
            batch: samples that earlier batches have used, and the number of the micro-batch.
            seq_len: length of each sample, in tokens or cells.
        """


class TokenWorkload:
    """Sequences of tokens, each of which is to predict the next."""

    def __init__(self, config: RunConfig, dp_rank: int, sources: Dict[str, Samples]) -> None:
        self._config, self._dp_rank, self._sources = config, dp_rank, sources
        self._dtype = getattr(torch, config.training.dtype)
        self._targets = 0

    def has(self, split: str) -> bool:
        """Return whether there are samples of a split."""
        return split in self._sources

    def sequence_length(self, iteration: int, used: int) -> int:
        """Return the tokens of each sample of an iteration; see :class:`Workload`."""
        return sequence_length(self._config, iteration)

    def validation_length(self, used: int) -> int:
        """Return ``model.seq_len``."""
        return self._config.model.seq_len

    def distinct(self, seq_len: int, samples: int) -> int:
        """Return 0; see :meth:`Workload.distinct`."""
        return 0

    def terms(self, samples: int, seq_len: int) -> int:
        """Return the number of tokens."""
        return samples * seq_len

    def take_targets(self) -> int:
        """Return how many tokens had a target; see :meth:`Workload.take_targets`."""
        count, self._targets = self._targets, 0
        return count

    def forward(
        self, chunk: GPT, x: Optional[torch.Tensor], split: str, batch: Tuple[int, int], seq_len: int
    ) -> torch.Tensor:
        """Run a chunk; see :meth:`Workload.forward`."""
        first = first_sample(self._config, *batch, self._dp_rank)
        if self._config.data.document_mask:
            return self._forward_documents(chunk, x, split, first, seq_len)
        reads_tokens = chunk.chunk.has_embedding or chunk.chunk.has_head  # other stages do not need the tokens
        samples = self._sources[split].batch(first, self._config.training.micro_batch) if reads_tokens else None
        tokens = torch.from_numpy(samples[:, : seq_len + 1]) if samples is not None else None
        y: torch.Tensor = chunk(
            tokens[:, :-1] if x is None and tokens is not None else x,
            tokens[:, 1:] if tokens is not None else None,
            first,
        )
        return y

    def _forward_documents(
        self, chunk: GPT, x: Optional[torch.Tensor], split: str, first: int, seq_len: int
    ) -> torch.Tensor:
        """Run a chunk on samples whose documents are apart. Every stage reads them, since attention depends on where
        they begin."""
        config, samples = self._config, cast(PackedSamples, self._sources[split])
        batch = samples.packed_batch(first, config.training.micro_batch)
        tokens, begins = torch.from_numpy(batch.tokens[:, : seq_len + 1]), batch.begins[:, : seq_len + 1]
        documents = Documents.of(config.model, begins[:, :-1], config.data.reset_positions, self._dtype, chunk.shard)
        targets = tokens[:, 1:]
        if config.data.counts_targets and chunk.chunk.has_head:
            targets = targets.masked_fill(torch.from_numpy(begins[:, 1:]), NO_TARGET)
            self._targets += int((targets != NO_TARGET).sum())
        y: torch.Tensor = chunk(tokens[:, :-1] if x is None else x, targets, first, documents=documents)
        return y


class GridWorkload:
    """Grids, whose class is to be predicted. Every stage reads them, since attention depends on their sizes."""

    def __init__(self, config: RunConfig, dp_rank: int, sources: Dict[str, GridSource]) -> None:
        self._config, self._dp_rank, self._sources = config, dp_rank, sources
        self._dtype = getattr(torch, config.training.dtype)

    def has(self, split: str) -> bool:
        """Return whether there are samples of a split."""
        return split in self._sources

    def sequence_length(self, iteration: int, used: int) -> int:
        """Return the cells of the grids of the batch after ``used`` samples, padding included."""
        return self._sources[TRAIN].cells(self._batch_start(used))

    def validation_length(self, used: int) -> int:
        """Return the cells of the grids of a batch of validation, padding included."""
        return self._sources[VALID].cells(self._batch_start(used))

    def distinct(self, seq_len: int, samples: int) -> int:
        """Return how many different grids validation samples are; see :meth:`Workload.distinct`."""
        return self._sources[VALID].distinct(seq_len, samples)

    def terms(self, samples: int, seq_len: int) -> int:
        """Return the number of grids."""
        return samples

    def take_targets(self) -> int:
        """Return 0; see :meth:`Workload.take_targets`."""
        return 0

    def forward(
        self, chunk: GPT, x: Optional[torch.Tensor], split: str, batch: Tuple[int, int], seq_len: int
    ) -> torch.Tensor:
        """Run a chunk; see :meth:`Workload.forward`."""
        used, micro_batch = batch
        first = first_sample(self._config, self._batch_start(used), micro_batch, self._dp_rank)
        grids = self._sources[split].batch(first, self._config.training.micro_batch)
        cells = Cells.of(self._config.model, grids.heights, grids.widths, seq_len, self._dtype, chunk.shard)
        colors = torch.from_numpy(grids.colors) if x is None else x
        y: torch.Tensor = chunk(colors, torch.from_numpy(grids.labels).unsqueeze(1), first, cells)
        return y

    def _batch_start(self, used: int) -> int:
        """Return the first sample of the next batch of one size. It comes after ``used`` samples only where a run was
        resumed with another global batch."""
        size = self._config.training.global_batch
        return -(-used // size) * size


def open_sources(config: RunConfig, validates: bool) -> Tuple[Any, Optional[Any], List[str]]:
    """Open the samples of a run: those to train on, those to validate on, and lines of the log about them.

    Raises:
        DataError: as :func:`fugaku_gpt.data.samples.open_samples` and
            :func:`fugaku_gpt.data.grid_samples.open_grid_splits`.
    """
    if not config.model.is_grid_classifier:
        return open_samples(config, TRAIN), open_samples(config, VALID) if validates else None, []
    grids = open_grid_splits(config, (TRAIN, VALID) if validates else (TRAIN,))
    return grids.samples[TRAIN], grids.samples.get(VALID), [grids.summary()]


def share_orders(world: Communicator, folder: Path, sources: Sequence[Optional[Source]]) -> List[str]:
    """Let rank 0 write the indices of samples that are in files, and all ranks map the same files; collective.

    Returns:
        lines of the log about the indices that were built, on rank 0.

    Raises:
        UsageError: an index cannot be built, written or read.
    """
    orders = [
        source for source in sources if isinstance(source, (MegatronSamples, SampleSource)) and source.has_indices
    ]
    if not orders:
        return []
    writers = orders if world.rank == 0 else []
    lines = collective_try(world, lambda: [line for order in writers for line in order.write_indices(folder)])
    for order in orders:
        collective_try(world, partial(order.open_indices, folder))
    return lines


def workload_of(
    config: RunConfig, dp_rank: int, skipped: SkippedSamples, train: Source, valid: Optional[Source]
) -> Workload:
    """Return the batches of a run on one replica."""
    sources: Dict[str, Any] = {TRAIN: train, **({VALID: valid} if valid is not None else {})}
    if config.model.is_grid_classifier:
        return GridWorkload(config, dp_rank, sources)
    sources[TRAIN] = RemainingSamples(sources[TRAIN], skipped)
    return TokenWorkload(config, dp_rank, sources)
