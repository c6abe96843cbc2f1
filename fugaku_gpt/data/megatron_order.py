"""Megatron-Core's order of samples, as index arrays: which documents follow one another, where each sample begins, and
which sample is the n-th.

The arrays equal those of Megatron-Core's ``GPTDataset`` and ``BlendedDataset`` bit for bit (version 0.16.1 on x86-64).
They depend on the number of samples that is asked for, since it decides how many epochs are shuffled together:

* The documents of a split are repeated for as many epochs as the samples take, and shuffled as one array. If the last
  epoch gives less than 80 % of its samples, it is shuffled for itself and follows the others.
* Sample k is tokens [k * s, k * s + s] of the documents in this order, s being the sequence length.
* The samples are shuffled; those that begin in a last epoch apart are shuffled among themselves.
* A blend gives each next sample to the corpus that lags its share most.

All shuffles of a split draw from one ``numpy.random.RandomState``, whose stream NumPy has promised not to change
(NEP 19).
"""

from __future__ import annotations

import math
from array import array
from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np

_SURPLUS = 0.005  # of a blend's corpora: samples that are ordered beyond a corpus's share
_LEAST_OF_LAST_EPOCH = 0.8
_MOST_LOOPED_CORPORA = 12  # with more of them a vector operation for each sample is faster than a loop


class EpochPlan(NamedTuple):
    """The epochs of one corpus's split.

    Attributes:
        epochs: how often each document appears.
        samples: samples of all epochs.
        samples_before_last: samples that are shuffled together; less than ``samples`` if the last epoch is apart.
    """

    epochs: int
    samples: int
    samples_before_last: int

    @property
    def is_last_apart(self) -> bool:
        """Whether the last epoch is shuffled for itself."""
        return self.samples_before_last < self.samples


class StreamOrder(NamedTuple):
    """The index arrays of one corpus's split.

    Attributes:
        document_index: [epochs * documents] int32, documents in their order.
        sample_index: [samples + 1, 2] int32, or int64 where an entry could be too large for it: the position in
            ``document_index`` and the token within that document at which each sample begins.
        shuffle_index: [samples] uint32, or int64 for 2³² - 2 samples and more: the sample that is the n-th.
    """

    document_index: "np.ndarray[Any, np.dtype[Any]]"
    sample_index: "np.ndarray[Any, np.dtype[Any]]"
    shuffle_index: "np.ndarray[Any, np.dtype[Any]]"


def split_bounds(documents: int, shares: Sequence[float]) -> List[Tuple[int, int]]:
    """The contiguous documents [first, last) of train, valid and test: the ends of the shares, rounded to documents."""
    ends = [0.0]
    for share in _normalized(shares):
        ends.append(ends[-1] + share)
    bounds = [int(round(end * float(documents))) for end in ends]
    return list(zip(bounds[:-1], bounds[1:]))


def plan_epochs(tokens: int, seq_len: int, samples: int) -> EpochPlan:
    """Return the epochs that have at least ``samples`` samples; one epoch for 0.

    Args:
        tokens: tokens of one epoch, at least ``seq_len`` + 1.
        seq_len: tokens of a sample, without that of the last target.
        samples: samples that are asked for.
    """
    epochs = max(1, -(-(samples * seq_len + 1) // tokens))
    count = (epochs * tokens - 1) // seq_len
    if epochs == 1:
        return EpochPlan(epochs, count, count)
    before_last = ((epochs - 1) * tokens - 1) // seq_len
    of_epoch = (tokens - 1) // seq_len
    is_last_apart = samples - before_last < int(_LEAST_OF_LAST_EPOCH * of_epoch)
    return EpochPlan(epochs, count, before_last if is_last_apart else count)


def type_of_sample_index(documents: int, longest: int) -> str:
    """Return the data type of a sample index.

    Args:
        documents: entries of the document index.
        longest: tokens of the longest sequence of the corpus, whatever its split.
    """
    return "int32" if max(documents, longest) <= np.iinfo(np.int32).max else "int64"


def type_of_shuffle_index(samples: int) -> str:
    """Return the data type of a shuffle index."""
    return "int64" if samples >= np.iinfo(np.uint32).max - 1 else "uint32"


def order_stream(
    lengths: "np.ndarray[Any, np.dtype[Any]]", bounds: Tuple[int, int], seq_len: int, plan: EpochPlan, seed: int
) -> StreamOrder:
    """Build the index arrays of one corpus's split.

    Args:
        lengths: [sequences] tokens of each sequence of the corpus.
        bounds: sequences [first, last) of the split.
        seq_len: tokens of a sample, without that of the last target.
        plan: the epochs, as :func:`plan_epochs` returns them.
        seed: seed of the shuffles, below 2³².
    """
    random = np.random.RandomState(seed)
    together = plan.epochs - 1 if plan.is_last_apart else plan.epochs
    parts = []
    for epochs in (together, plan.epochs - together):
        part = np.tile(np.arange(*bounds, dtype=np.int32), epochs)
        if epochs:
            random.shuffle(part)
        parts.append(part)
    document_index = np.concatenate(parts)

    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    sample_type = type_of_sample_index(len(document_index), int(lengths.max()))
    sample_index = np.zeros((plan.samples + 1, 2), dtype=sample_type)  # the first begins at the first, be it empty
    starts = np.arange(1, plan.samples + 1, dtype=np.int64) * seq_len
    positions = np.searchsorted(ends, starts, side="right")
    sample_index[1:, 0] = positions
    sample_index[1:, 1] = starts - (ends[positions] - lengths[document_index[positions]])

    shuffle_type = type_of_shuffle_index(plan.samples)
    first = np.arange(plan.samples_before_last, dtype=shuffle_type)
    random.shuffle(first)
    last = np.arange(plan.samples_before_last, plan.samples, dtype=shuffle_type)
    if len(last):
        random.shuffle(last)
    return StreamOrder(document_index, sample_index, np.concatenate((first, last)))


class BlendPlan(NamedTuple):
    """The samples of a blend.

    Attributes:
        weights: share of each corpus; their sum is 1.
        size: samples of the blend.
        samples: samples that each corpus is ordered for; 0: one epoch.
    """

    weights: List[float]
    size: int
    samples: List[int]


def plan_weighted_blend(weights: Sequence[float], samples: int) -> BlendPlan:
    """Return the samples of a blend with these weights: of each corpus its share, rounded up."""
    shares = _normalized(weights)
    exact = [int(math.ceil(samples * share)) for share in shares]
    with_surplus = [int(math.ceil(count * (1 + _SURPLUS))) for count in exact]
    return BlendPlan(_normalized(shares), sum(exact), with_surplus)  # it is twice that Megatron normalises them


def plan_unweighted_blend(sizes: Sequence[int], samples: int) -> BlendPlan:
    """Return the samples of a blend of corpora without weights, each of which is read once at most.

    Args:
        sizes: samples of one epoch of each corpus.
        samples: samples that are asked for.
    """
    return BlendPlan(_normalized(sizes), min(samples, sum(sizes)), [0] * len(sizes))


def order_blend(
    weights: Sequence[float], size: int
) -> "Tuple[np.ndarray[Any, np.dtype[Any]], np.ndarray[Any, np.dtype[Any]]]":
    """Build the index arrays of a blend: [size] int16, the corpus of each sample, and [size] int64, the number of the
    sample within that corpus.

    Sample n goes to the corpus with the largest weight * max(n, 1) - samples so far, in float64 with each operation
    rounded, the first of several.
    """
    choose = _choose_by_loop if len(weights) <= _MOST_LOOPED_CORPORA else _choose_by_vector
    dataset_index = np.frombuffer(choose(list(map(float, weights)), size), dtype=np.int16)
    dataset_sample_index = np.empty(size, dtype=np.int64)
    for corpus in range(len(weights)):
        is_of_corpus = dataset_index == corpus
        dataset_sample_index[is_of_corpus] = np.arange(np.count_nonzero(is_of_corpus))
    return dataset_index, dataset_sample_index


def _choose_by_loop(weights: List[float], size: int) -> "array[int]":
    corpora = range(1, len(weights))
    counts = [0.0] * len(weights)
    chosen = array("h", [0]) * size
    for number in range(size):
        position = float(number or 1)
        best, largest = 0, weights[0] * position - counts[0]
        for corpus in corpora:
            lag = weights[corpus] * position - counts[corpus]
            if lag > largest:
                best, largest = corpus, lag
        chosen[number] = best
        counts[best] += 1.0
    return chosen


def _choose_by_vector(weights: List[float], size: int) -> "array[int]":
    shares, counts = np.array(weights), np.zeros(len(weights))
    chosen = array("h", [0]) * size
    for number in range(size):
        lag = shares * float(number or 1)
        lag -= counts
        best = int(lag.argmax())
        chosen[number] = best
        counts[best] += 1.0
    return chosen


def _normalized(weights: Sequence[float]) -> List[float]:
    values = np.array(weights, dtype=np.float64)
    normalized: List[float] = (values / np.sum(values)).tolist()
    return normalized
