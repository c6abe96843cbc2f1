"""Samples in Megatron-Core's order: what :mod:`fugaku_gpt.data.megatron_order` builds, for the corpora of a run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.corpus import Corpus
from fugaku_gpt.data.index_files import Arrays, IndexArrays
from fugaku_gpt.data.megatron_order import (
    BlendPlan,
    EpochPlan,
    order_blend,
    order_stream,
    plan_epochs,
    plan_unweighted_blend,
    plan_weighted_blend,
    split_bounds,
    type_of_sample_index,
    type_of_shuffle_index,
)
from fugaku_gpt.data.packed_batch import PackedBatch, fingerprint_of_documents
from fugaku_gpt.data.sample_checks import (
    NoSamples,
    require_lengths,
    require_sample,
    require_vocabulary,
    samples_read,
    used_samples,
)
from fugaku_gpt.data.sample_fingerprint import SampleFingerprint
from fugaku_gpt.errors import DataError

_MOST_DOCUMENTS = 2**31 - 1  # the number of a document is an int32


def requested_samples(config: RunConfig, split: str) -> int:
    """The number of samples for which Megatron orders a split: those of the training, or of all its validations."""
    training = config.training
    if split == "train":
        return config.data.order_samples or used_samples(config)
    validations = training.iterations // training.eval_interval + 1 if training.eval_interval else 1
    return (validations if split == "valid" else 1) * training.eval_batches * training.global_batch


class MegatronStream:
    """The ordered samples of one corpus's split.

    Attributes:
        tokens, documents: numbers in one epoch.
        samples_of_epoch: samples of one epoch.
        arrays: the index arrays.
    """

    def __init__(self, corpus: Corpus, bounds: Tuple[int, int], config: RunConfig, split: str) -> None:
        """Count the tokens of the sequences ``bounds`` of a corpus; :meth:`order` follows.

        Raises:
            NoSamples: the split has no sample.
            DataError: the corpus has more sequences than Megatron's index can number.
        """
        self._corpus = corpus
        self._bounds = bounds
        self._seq_len, self._vocab_size = config.model.seq_len, config.model.vocab_size
        self._seed = config.training.seed
        self._lengths = corpus.index.lengths
        self.documents = bounds[1] - bounds[0]
        self.tokens = corpus.index.tokens_of(*bounds)
        require_sample(corpus, split, self.documents, self.tokens, self._seq_len)
        if corpus.index.sequences > _MOST_DOCUMENTS:
            raise DataError(
                f"{corpus.path}: has {corpus.index.sequences} sequences, more than the {_MOST_DOCUMENTS} of Megatron's "
                "index; valid: data.order ours"
            )
        self.samples_of_epoch = (self.tokens - 1) // self._seq_len
        self._plan = EpochPlan(1, self.samples_of_epoch, self.samples_of_epoch)
        self.arrays: IndexArrays

    def order(self, samples: int, key: str) -> None:
        """Order the stream for a number of samples, 0 for one epoch; ``key`` names its files."""
        plan = self._plan = plan_epochs(self.tokens, self._seq_len, samples)
        entries = plan.epochs * self.documents
        shapes = {
            "document_index": ((entries,), "int32"),
            "sample_index": ((plan.samples + 1, 2), type_of_sample_index(entries, int(self._lengths.max()))),
            "shuffle_index": ((plan.samples,), type_of_shuffle_index(plan.samples)),
        }
        self.arrays = IndexArrays(key, shapes, self._build)

    @property
    def size(self) -> int:
        """Number of samples of all epochs."""
        return self._plan.samples

    def packed_sample(
        self, number: int
    ) -> "Tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]":
        """[seq_len + 1] token ids of a sample, and whether a document begins with each.

        Raises:
            DataError: the file of an index is damaged, or the sample has a token id outside the model's vocabulary.
        """
        documents = len(self.arrays["document_index"])
        window = int(self.arrays.entry("shuffle_index", number))
        if not 0 <= window < self._plan.samples:
            raise self._damaged(f"sample {number} is the {window}-th of {self._plan.samples}")
        position, offset = (int(value) for value in self.arrays.entry("sample_index", window))
        tokens, begins = np.empty(self._seq_len + 1, dtype=np.int64), np.zeros(self._seq_len + 1, dtype=np.bool_)
        filled = 0
        while filled < len(tokens):
            if not 0 <= position < documents:
                raise self._damaged(f"sample {number} reads document {position} of {documents}")
            document = int(self.arrays.entry("document_index", position))
            if not self._bounds[0] <= document < self._bounds[1]:
                raise self._damaged(f"it has document {document} in a split of {self._bounds[0]} to {self._bounds[1]}")
            length = min(len(tokens) - filled, int(self._lengths[document]) - offset)
            if length < 0 or offset < 0:
                raise self._damaged(f"sample {number} begins at token {offset} of document {document}")
            tokens[filled : filled + length] = self._corpus.index.sequence(document, offset, length)
            if offset == 0:  # one without tokens begins where the next one does
                begins[filled] = True
            filled, offset, position = filled + length, 0, position + 1
        require_vocabulary(self._corpus, tokens, self._vocab_size)
        return tokens, begins

    def _build(self) -> Arrays:
        require_lengths(self._corpus, *self._bounds)
        return order_stream(self._lengths, self._bounds, self._seq_len, self._plan, self._seed)._asdict()

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self.arrays.key}-*.npy, indices of the samples: damaged: {problem}; remove the files")


class MegatronBlend:
    """The corpora of the samples of a blend, by Megatron's index arrays.

    Attributes:
        size: number of samples.
        arrays: the index arrays; none for one corpus without a weight.
    """

    def __init__(self, plan: BlendPlan, streams: Sequence[MegatronStream], key: str) -> None:
        self._plan, self._streams = plan, streams
        self.size = plan.size
        shapes = {"dataset_index": ((plan.size,), "int16"), "dataset_sample_index": ((plan.size,), "int64")}
        self.arrays = IndexArrays(key, shapes, self._build)

    def locate(self, number: int) -> Tuple[int, int]:
        """Return the corpus of a sample, and the number of the sample within that corpus.

        Raises:
            DataError: the file of an index is damaged.
        """
        corpus, number_in_corpus = (
            int(self.arrays.entry("dataset_index", number)),
            int(self.arrays.entry("dataset_sample_index", number)),
        )
        if not 0 <= corpus < len(self._streams) or not 0 <= number_in_corpus < self._streams[corpus].size:
            raise DataError(
                f"{self.arrays.key}-*.npy, indices of the samples: damaged: sample {number} is sample "
                f"{number_in_corpus} of corpus {corpus}; remove the files"
            )
        return corpus, number_in_corpus

    def _build(self) -> Arrays:
        corpora, numbers = order_blend(self._plan.weights, self._plan.size)
        for stream, count in zip(self._streams, np.bincount(corpora, minlength=len(self._streams)).tolist()):
            if count > stream.size:
                raise DataError(
                    f"data.order megatron: the blend takes {count} samples of a corpus that has {stream.size} in one "
                    "epoch, which Megatron refuses, too; state data.weights"
                )
        return {"dataset_index": corpora, "dataset_sample_index": numbers}


class MegatronSamples:
    """One split of the corpora in Megatron's order.

    Attributes:
        seq_len: tokens per sample, without the additional token of the last target.
        tokens, documents: numbers in one epoch of all corpora.
        size: number of samples.
        fingerprint: SHA-256 over the corpora, weights, split, the number of samples that the order is made for, and
            the fields of ``data.document_mask``.
    """

    def __init__(self, config: RunConfig, corpora: Sequence[Corpus], split: str, number_of_split: int) -> None:
        """Plan the order of a split, the ``number_of_split``-th of ``data.split``; no index is built yet.

        Raises:
            NoSamples: the split of a corpus has no sample, or too few for a validation.
            DataError: the run takes more samples than the order has.
        """
        data, self.seq_len, self._split = config.data, config.model.seq_len, split
        bounds = [split_bounds(corpus.index.sequences, data.split)[number_of_split] for corpus in corpora]
        self._streams = [MegatronStream(corpus, part, config, split) for corpus, part in zip(corpora, bounds)]
        self.tokens = sum(stream.tokens for stream in self._streams)
        self.documents = sum(stream.documents for stream in self._streams)
        requested = requested_samples(config, split)
        settings = ("megatron", tuple(data.weights), data.split, split, self.seq_len, requested)
        of_indices = SampleFingerprint(repr(settings).encode(), corpora)  # the same with data.document_mask
        key = hashlib.sha256(f"{of_indices.value} {config.training.seed}".encode()).hexdigest()[:16]
        self._fingerprint = SampleFingerprint(repr(settings).encode(), corpora, fingerprint_of_documents(data))
        self.fingerprint = self._fingerprint.value
        is_blend = len(corpora) > 1 or bool(data.weights)
        plan = _plan_blend(data.weights, self._streams, requested)
        self._blend = MegatronBlend(plan, self._streams, f"{key}-{split}-blend") if is_blend else None
        for number, (stream, samples) in enumerate(zip(self._streams, plan.samples)):
            stream.order(samples if is_blend else requested, f"{key}-{split}-{number}")
        self.size = self._streams[0].size if self._blend is None else self._blend.size
        self._require_samples(config, split)

    def has_fingerprint(self, recorded: str) -> bool:
        """Whether a recorded fingerprint is that of these samples, by this or an older version."""
        return self._fingerprint.is_recorded_as(recorded)

    def sample(self, number: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[seq_len + 1] token ids of a sample; numbers start at 0.

        Raises:
            DataError: the order has no such sample, a file is damaged, or a token id is outside the model's vocabulary.
        """
        return self._packed_sample(number)[0]

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[count, seq_len + 1] token ids of consecutive samples."""
        return np.stack([self.sample(number) for number in range(first, first + count)])

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        """Consecutive samples, and where their documents begin."""
        samples = [self._packed_sample(number) for number in range(first, first + count)]
        return PackedBatch(np.stack([tokens for tokens, _ in samples]), np.stack([begins for _, begins in samples]))

    @property
    def has_indices(self) -> bool:
        """Whether there are indices to be written, as always in this order."""
        return True

    def write_indices(self, folder: Path) -> List[str]:
        """Build the indices and write them to files in a folder, unless they are there; return lines of the log.

        Raises:
            DataError: a file cannot be written, or a blend takes more of a corpus than it has.
        """
        seconds = [taken for taken in (index.write(folder) for index in self._indices()) if taken is not None]
        if not seconds:
            return [f"Megatron's order of {self.size} {self._split} samples is read from {folder}"]
        return [f"Megatron's order of {self.size} {self._split} samples was built in {sum(seconds):.1f} s: {folder}"]

    def open_indices(self, folder: Path) -> None:
        """Map the files that :meth:`write_indices` has left; without it, the indices are built in memory when the first
        sample is read.

        Raises:
            DataError: a file is missing or damaged.
        """
        for index in self._indices():
            index.open(folder)

    def _packed_sample(
        self, number: int
    ) -> "Tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]":
        if number >= self.size:
            raise DataError(
                f"data.order megatron: sample {number} is asked for, and the order has {self.size}; "
                f"begin the run with a larger data.order_samples"
            )
        corpus, number_in_corpus = self._blend.locate(number) if self._blend is not None else (0, number)
        return self._streams[corpus].packed_sample(number_in_corpus)

    def _indices(self) -> List[IndexArrays]:
        blend = [self._blend.arrays] if self._blend is not None else []
        return [*(stream.arrays for stream in self._streams), *blend]

    def _require_samples(self, config: RunConfig, split: str) -> None:
        if split != "train":
            consumed = samples_read(config, split)
            if consumed > self.size:
                raise NoSamples(
                    f"data.order megatron: the {split} split of the blend has {self.size} samples, and "
                    f"training.eval_batches x training.global_batch takes {consumed}; state data.weights, with which "
                    "Megatron repeats them"
                )
            return
        consumed = samples_read(config, split)
        if consumed <= self.size:
            return
        problem = f"data.order megatron: the run takes {consumed} samples, and the order has {self.size}"
        if self._blend is not None and not config.data.weights:
            mend = "Megatron reads each corpus of a blend without weights once: state data.weights"
        else:
            mend = f"valid: data.order_samples of {consumed} or more, which is another order"
        raise DataError(f"{problem}; {mend}, or fewer training.iterations")


def _plan_blend(weights: Sequence[float], streams: List[MegatronStream], samples: int) -> BlendPlan:
    if weights:
        return plan_weighted_blend(weights, samples)
    return plan_unweighted_blend([stream.samples_of_epoch for stream in streams], samples)
