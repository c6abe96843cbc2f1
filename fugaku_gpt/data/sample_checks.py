"""The number of samples of a run, and checks that all orders of samples share: enough tokens in a split, and no token
outside the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.corpus import Corpus
from fugaku_gpt.errors import DataError
from fugaku_gpt.layout.batch import SkippedSamples, iteration_sizes


class NoSamples(DataError):
    """A split of a corpus, or of a set of grids, is too small for one sample."""


def used_samples(config: RunConfig) -> int:
    """The samples of all iterations, without skipped ones."""
    training = config.training
    if training.ramp_start is None:
        return training.iterations * training.global_batch
    return sum(samples for samples, _ in iteration_sizes(config))


def samples_read(config: RunConfig, split: str) -> int:
    """The number of the last sample of a split that a run reads, plus one: of training with those that it skips, of
    another split those of one validation."""
    training = config.training
    if split == "train":
        return SkippedSamples(training.skip_samples).number(used_samples(config) - 1) + 1
    return training.eval_batches * training.global_batch


def require_sample(corpus: Corpus, split: str, documents: int, tokens: int, seq_len: int) -> None:
    """Check that a split has one sample at least.

    Raises:
        NoSamples: it has fewer than ``seq_len`` + 1 tokens.
    """
    if tokens < seq_len + 1:
        raise NoSamples(
            f"{corpus.path}: its {split} split has {_count(tokens, 'token')} in "
            f"{_count(documents, 'document')} of {corpus.index.sequences}, "
            f"less than one sample of model.seq_len + 1 = {seq_len + 1}; "
            "a split never cuts a document: use more of them, a shorter sequence, or another data.split"
        )


def require_lengths(corpus: Corpus, first: int, last: int) -> None:
    """Check that the lengths of the sequences [first, last), of which opening a large index reads the ends alone, can
    be those of their tokens.

    Raises:
        DataError: a length is negative, or they do not add up to the tokens.
    """
    lengths, tokens = corpus.index.lengths[first:last], corpus.index.tokens_of(first, last)
    if int(lengths.min()) < 0:
        raise corpus.damaged_lengths(first, last, "one of them is negative")
    total = int(lengths.sum(dtype=np.int64))
    if total != tokens:
        raise corpus.damaged_lengths(first, last, f"they add up to {total}, and their bytes are {tokens} tokens")


def require_vocabulary(corpus: Corpus, tokens: "np.ndarray[Any, np.dtype[Any]]", vocab_size: int) -> None:
    """Check that all ids of a sample are tokens of the model.

    Raises:
        DataError: an id is negative, or not below ``vocab_size``.
    """
    largest = int(tokens.max())
    if largest >= vocab_size or int(tokens.min()) < 0:
        invalid = largest if largest >= vocab_size else int(tokens.min())
        raise DataError(
            f"{corpus.index.bin_path}: token id {invalid} is outside the vocabulary; model.vocab_size is {vocab_size}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
