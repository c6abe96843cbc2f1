"""Numbered training samples: a pure function of (seed, number), so the only data state is the samples consumed.

The documents of a split are permuted for each epoch and concatenated, epoch after epoch, to one endless stream of
tokens. Window k of the stream is tokens [k * s, k * s + s], s + 1 of them, so neighbours share one token and
windows run across the ends of documents and epochs, as in Megatron's GPT dataset. The windows that start in one epoch
are permuted among themselves, which gives the order of samples.

A document begins where a sequence of the corpus's index does. The index says so whatever the tokens are: not every
corpus has tokens that end its documents, and in a blend each may have others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import MEGATRON_ORDER
from fugaku_gpt.data import megatron_order
from fugaku_gpt.data.blend import Blend
from fugaku_gpt.data.corpus import Corpus, count_of_sequences, open_corpus
from fugaku_gpt.data.document_orders import DocumentOrder
from fugaku_gpt.data.megatron_samples import MegatronSamples
from fugaku_gpt.data.packed_batch import PackedBatch, fingerprint_of_documents
from fugaku_gpt.data.permutation import permuted_index, stream_key
from fugaku_gpt.data.sample_checks import require_sample, require_vocabulary, samples_read
from fugaku_gpt.data.sample_fingerprint import SampleFingerprint
from fugaku_gpt.errors import DataError

SPLITS = ("train", "valid", "test")
_VALID = 1
_MAX_CACHED_EPOCHS = 2  # a window may span two epochs
_DOCUMENTS_IN_FILES = 2**22  # of a split, from which on all ranks map one order: it has 64 MiB


def open_samples(config: RunConfig, split: str) -> "Union[SampleSource, MegatronSamples]":
    """Open the samples of one split (``train``, ``valid`` or ``test``) of a run's corpora, in the order that it states.

    Raises:
        NoSamples: the split is too small for one sample.
        DataError: no corpora are named, a corpus cannot be opened, its vocabulary is larger than the model's, or
            Megatron's order has fewer samples than the run takes.
    """
    data, model = config.data, config.model
    if not data.paths:
        raise DataError(
            "data.paths: empty: name a corpus with --data DIR; "
            "make one with `fugaku-gpt data prepare --stdlib --out DIR`"
        )
    corpora = [_open_corpus(path, model.vocab_size) for path in data.paths]
    if data.order == MEGATRON_ORDER:
        return MegatronSamples(config, corpora, split, SPLITS.index(split))
    streams = []
    shifted: List[Tuple[int, List[Tuple[int, int]]]] = []
    for number, corpus in enumerate(corpora):
        bounds = splits_of(corpus.index.lengths, data.split, model.seq_len)
        if bounds != split_bounds(corpus.index.sequences, data.split):
            shifted.append((number, bounds))
        first, last = bounds[SPLITS.index(split)]
        key = stream_key(config.training.seed, split, number)
        streams.append(_Stream(corpus, first, last, model.seq_len, model.vocab_size, key, split))
    weights = list(data.weights) or [float(stream.tokens) for stream in streams]
    settings = repr((tuple(weights), data.split, split, model.seq_len)).encode()
    if shifted:  # only then, so that fingerprints of other corpora stay as they were
        settings += repr(shifted).encode()
    fingerprint = SampleFingerprint(settings + fingerprint_of_documents(data), corpora)
    return SampleSource(streams, weights, model.seq_len, fingerprint, samples_read(config, split))


def surely_has_samples(config: RunConfig, split: str) -> bool:
    """Whether the split of each corpus has more documents than ``model.seq_len``, and so a sample if none is empty.

    It reads the header of each index alone, where :func:`open_samples` opens and checks both files. A split for which
    it is False may have a sample all the same, and one of empty documents, which ``data prepare`` leaves out, none.
    """
    data = config.data
    is_megatrons = data.order == MEGATRON_ORDER
    if is_megatrons and len(data.paths) > 1 and not data.weights:
        return False  # which reads each corpus once, so that a validation may want more samples than there are
    bounds_of = megatron_order.split_bounds if is_megatrons else split_bounds
    for path in data.paths:
        first, last = bounds_of(count_of_sequences(path), data.split)[SPLITS.index(split)]
        if last - first <= config.model.seq_len:
            return False
    return True


def _open_corpus(path: str, vocab_size: int) -> Corpus:
    corpus = open_corpus(path)
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        raise DataError(
            f"{path}: its tokenizer has {corpus.vocab_size} tokens, more than model.vocab_size {vocab_size}; "
            f"valid: --set model.vocab_size={corpus.vocab_size}"
        )
    return corpus


def split_bounds(documents: int, shares: Sequence[float]) -> List[Tuple[int, int]]:
    """The contiguous documents [first, last) of train, valid and test, rounded as in Megatron."""
    total = sum(shares)
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + int(round(share / total * documents)))
    excess = bounds[-1] - documents  # an excess by rounding is taken from the front of every later split
    bounds = [0] + [max(0, bound - excess) for bound in bounds[1:]]
    return list(zip(bounds[:-1], bounds[1:]))


def splits_of(
    lengths: "np.ndarray[Any, np.dtype[Any]]", shares: Sequence[float], seq_len: int
) -> List[Tuple[int, int]]:
    """The documents [first, last) of train, valid and test, with at least one for validation where that is possible.

    Where rounding leaves none for a validation that has a share, it gets the last document of train, if it and the rest
    of train have a sample of ``seq_len`` + 1 tokens each.

    Args:
        lengths: [documents] tokens of each.
        shares: shares of train, valid and test.
        seq_len: tokens of a sample, without that of the last target.
    """
    bounds = split_bounds(len(lengths), shares)
    (first, last), (valid_first, valid_last), test = bounds
    if valid_first < valid_last or shares[_VALID] <= 0 or last - first < 2:
        return bounds
    rest = int(lengths[first : last - 1].sum(dtype=np.int64))
    if min(rest, int(lengths[last - 1])) < seq_len + 1:
        return bounds
    return [(first, last - 1), (last - 1, last), test]


class SampleSource:
    """One split of the blended corpora.

    Attributes:
        seq_len: tokens per sample, without the additional token of the last target.
        tokens, documents: numbers in one epoch of all corpora.
        fingerprint: SHA-256 over the corpora, weights and split.
    """

    def __init__(
        self,
        streams: "Sequence[_Stream]",
        weights: Sequence[float],
        seq_len: int,
        fingerprint: SampleFingerprint,
        samples: int,
    ) -> None:
        """``samples``: number of samples that are read, as far as it is known."""
        self._streams = list(streams)
        self._blend = Blend(weights)
        self._samples = samples
        self.seq_len = seq_len
        self.tokens = sum(stream.tokens for stream in streams)
        self.documents = sum(stream.documents for stream in streams)
        self.fingerprint = fingerprint.value
        self._fingerprint = fingerprint

    def has_fingerprint(self, recorded: str) -> bool:
        """Whether a recorded fingerprint is that of these samples, by this or an older version."""
        return self._fingerprint.is_recorded_as(recorded)

    def sample(self, number: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[seq_len + 1] token ids of a sample; numbers start at 0 and have no end.

        Raises:
            DataError: the sample has a token id outside the model's vocabulary.
        """
        corpus, number_in_corpus = self._blend.locate(number)
        return self._streams[corpus].sample(number_in_corpus)

    @property
    def has_indices(self) -> bool:
        """Whether a corpus has enough documents for orders in files."""
        return any(stream.epochs_in_files(count) for stream, count in self._samples_of_streams())

    def write_indices(self, folder: Path) -> List[str]:
        """Build the orders of large corpora and write them to files in a folder, unless they are there; return lines of
        the log.

        Raises:
            DataError: a file cannot be written, or the index of a corpus is damaged.
        """
        lines = []
        for stream, count in self._samples_of_streams():
            for epoch in range(stream.epochs_in_files(count)):
                order = stream.new_order(epoch)
                seconds = order.write(folder)
                done = f"was built in {seconds:.1f} s" if seconds is not None else "is there"
                lines.append(f"the order of {order.size} documents {done}: {folder / order.key}-*.npy")
        return lines

    def open_indices(self, folder: Path) -> None:
        """Map the files that :meth:`write_indices` has left; without it, the orders are built in memory when the first
        sample of an epoch is read.

        Raises:
            DataError: a file is missing or damaged.
        """
        for stream, count in self._samples_of_streams():
            stream.open_orders(folder, stream.epochs_in_files(count))

    def _samples_of_streams(self) -> "List[Tuple[_Stream, int]]":
        """Each stream, and the number of its samples that are read."""
        return list(zip(self._streams, self._blend.counts(self._samples)))

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[count, seq_len + 1] token ids of consecutive samples."""
        return np.stack([self.sample(number) for number in range(first, first + count)])

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        """Consecutive samples, and where their documents begin."""
        places = [self._blend.locate(number) for number in range(first, first + count)]
        samples = [self._streams[corpus].packed_sample(number) for corpus, number in places]
        return PackedBatch(np.stack([tokens for tokens, _ in samples]), np.stack([begins for _, begins in samples]))


class _Stream:
    """The endless stream of one corpus's split."""

    def __init__(
        self, corpus: Corpus, first: int, last: int, seq_len: int, vocab_size: int, key: int, split: str
    ) -> None:
        self.corpus = corpus
        self.documents = last - first
        self._first = first
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._key, self._split = key, split
        self._lengths = corpus.index.lengths[first:last]
        self.tokens = corpus.index.tokens_of(first, last)
        require_sample(corpus, split, self.documents, self.tokens, seq_len)
        self._epochs: Dict[int, DocumentOrder] = {}
        self._folder: Optional[Path] = None  # of the files of the first epochs' orders; None: there are none
        self._epochs_in_folder = 0

    def sample(self, number: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[seq_len + 1] token ids of a sample of this stream."""
        return self.packed_sample(number)[0]

    def packed_sample(
        self, number: int
    ) -> "Tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]":
        """[seq_len + 1] token ids of a sample of this stream, and whether a document begins with each."""
        epoch = number * self._seq_len // self.tokens  # where window `number` starts
        start = self._window_start(epoch)
        size = self._window_start(epoch + 1) - start
        window = start + permuted_index(stream_key(self._key, "windows", epoch), size, number - start)
        tokens, begins = self._read(window * self._seq_len, self._seq_len + 1)
        require_vocabulary(self.corpus, tokens, self._vocab_size)
        return tokens, begins

    def _window_start(self, epoch: int) -> int:
        """Number of the first window that starts in an epoch; the numbers continue over all epochs."""
        return -(-epoch * self.tokens // self._seq_len)

    def _read(
        self, start: int, count: int
    ) -> "Tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]":
        """Tokens [start, start + count) of the stream, and whether a document begins with each."""
        tokens, begins = np.empty(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
        done = 0
        epoch, offset = divmod(start, self.tokens)
        while done < count:
            order = self._order(epoch)
            position = order.position_of(offset)
            while done < count and position < order.size:
                document = order.document(position)
                length = int(self._lengths[document])
                within = offset - (order.end(position) - length)
                length = min(count - done, length - within)
                tokens[done : done + length] = self.corpus.index.sequence(self._first + document, within, length)
                if within == 0:  # one without tokens begins where the next one does
                    begins[done] = True
                done, offset, position = done + length, offset + length, position + 1
            epoch, offset = epoch + 1, 0
        return tokens, begins

    def epochs_in_files(self, samples: int) -> int:
        """The number of epochs that the first samples of this stream use, if their orders are in files, or else 0: of
        those in which these begin, and the next one, in which the last of them may end."""
        if self.documents < _DOCUMENTS_IN_FILES or not samples:
            return 0
        return (samples - 1) * self._seq_len // self.tokens + 2

    def open_orders(self, folder: Path, epochs: int) -> None:
        """Read the orders of the first epochs from their files in a folder from now on.

        Raises:
            DataError: a file is missing or damaged.
        """
        for epoch in range(epochs):
            self.new_order(epoch).open(folder)
        self._folder, self._epochs_in_folder = folder, epochs

    def _order(self, epoch: int) -> DocumentOrder:
        """The documents in the order of an epoch."""
        if epoch not in self._epochs:
            while len(self._epochs) >= _MAX_CACHED_EPOCHS:
                del self._epochs[min(self._epochs)]
            order = self._epochs[epoch] = self.new_order(epoch)
            if self._folder is not None and epoch < self._epochs_in_folder:
                order.open(self._folder)
        return self._epochs[epoch]

    def new_order(self, epoch: int) -> DocumentOrder:
        """The documents in the order of an epoch, neither built nor mapped yet."""
        key, last = stream_key(self._key, "documents", epoch), self._first + self.documents
        name = hashlib.sha256(f"{self.corpus.fingerprint} {self._first} {last} {key}".encode()).hexdigest()[:16]
        return DocumentOrder(f"{name}-{self._split}-epoch-{epoch}", self.corpus, self._first, last, key)
