"""Looks into a corpus: how long its documents are, how much the tokenizer does not know, and how some of them begin.

A large corpus is looked at in evenly spaced places, so that neither time nor memory grow with it.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from fugaku_gpt.data.corpus import TOKENIZER, Corpus, prepared_folder
from fugaku_gpt.data.indexed import CHECKED_AT_ONCE, IndexedCorpus
from fugaku_gpt.data.tokenizer import LoadedTokenizer
from fugaku_gpt.errors import DataError

SAMPLES = 5  # documents that are shown
_SAMPLE_TOKENS = 64  # of each of them, from its first one
_RUN = 512  # neighbouring documents whose lengths are read
_BLOCKS, _BLOCK_TOKENS = 64, 2**16  # places where unknown tokens are counted


class LengthRange(NamedTuple):
    """Documents of ``low`` to ``high`` tokens: their number, and that of their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


class SampleDocument(NamedTuple):
    """The number of a document, its tokens, and how it begins: as text, or as ids where there is no tokenizer."""

    document: int
    tokens: int
    beginning: str


class Contents(NamedTuple):
    """Lengths, unknown tokens and samples of a corpus.

    Attributes:
        documents_read: number of documents whose lengths were read.
        shortest, median, longest: tokens of these documents, the end of document included.
        lengths: the ranges between powers of two that have documents, the shortest first.
        tokens_read: number of tokens that were compared with the unknown token.
        unknown: how many of them are it; None where there is no tokenizer, or it has no such token, as byte-level ones
            that know all text.
        samples: the beginnings of evenly spaced documents.
        problem: why a tokenizer that belongs to the corpus cannot be used; "" if it can.
    """

    documents_read: int
    shortest: int
    median: float
    longest: int
    lengths: Tuple[LengthRange, ...]
    tokens_read: int
    unknown: Optional[int]
    samples: Tuple[SampleDocument, ...]
    problem: str = ""

    @property
    def facts(self) -> Dict[str, Any]:
        """The values that are one number each."""
        return {
            "shortest_document": self.shortest,
            "median_document": self.median,
            "longest_document": self.longest,
            "unknown_rate": None if self.unknown is None else self.unknown / self.tokens_read,
        }


def look_into(corpus: Corpus) -> Contents:
    """Read the lengths, unknown tokens and samples of a corpus.

    Where the tokenizer cannot be used, what needs none is returned with the reason.

    Raises:
        DataError: an entry that is read is damaged.
    """
    folder = prepared_folder(corpus.path)
    tokenizer, problem = None, ""
    if folder is not None:
        try:
            tokenizer = LoadedTokenizer(folder / TOKENIZER)
        except DataError as error:
            problem = str(error)
    index = corpus.index
    lengths = index.document_lengths(_documents_to_read(index.documents))
    unknown, tokens = None, 0
    end = (corpus.manifest or {}).get("end_of_document", {}).get("id")
    if tokenizer is not None and tokenizer.unknown_id not in (None, end):  # GPT-2's is its end of text
        unknown = 0
        for block in _blocks_of_tokens(index):
            unknown += int(np.count_nonzero(block == tokenizer.unknown_id))
            tokens += len(block)
    return Contents(
        len(lengths), int(lengths.min()), float(np.median(lengths)), int(lengths.max()), _length_ranges(lengths),
        tokens, unknown, tuple(_samples(index, tokenizer)), problem,
    )  # fmt: skip


def _evenly_spaced(count: int, most: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """At most ``most`` of the numbers [0, count), with equal steps between them."""
    chosen = min(count, most)
    return np.arange(chosen, dtype=np.int64) * count // chosen


def _documents_to_read(count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """All documents, or evenly spaced runs of neighbours, whose entries of the index lie on one page each."""
    if count <= CHECKED_AT_ONCE:
        return np.arange(count, dtype=np.int64)
    runs = _evenly_spaced(count - _RUN, CHECKED_AT_ONCE // _RUN)
    return np.asarray((runs[:, None] + np.arange(_RUN)).ravel(), dtype=np.int64)


def _length_ranges(lengths: "np.ndarray[Any, np.dtype[np.int64]]") -> Tuple[LengthRange, ...]:
    exponents = np.frexp(lengths.astype(np.float64))[1]  # 2^(e-1) <= length < 2^e, and 0 for 0
    documents = np.bincount(exponents)
    tokens = np.bincount(exponents, weights=lengths)
    return tuple(
        LengthRange(2**exponent // 2, max(2**exponent - 1, 0), int(documents[exponent]), int(tokens[exponent]))
        for exponent in range(len(documents))
        if documents[exponent]
    )


def _blocks_of_tokens(index: IndexedCorpus) -> "Iterator[np.ndarray[Any, np.dtype[Any]]]":
    if index.tokens <= _BLOCKS * _BLOCK_TOKENS:
        yield index.tokens_at(0, index.tokens)
        return
    for first in _evenly_spaced(index.tokens - _BLOCK_TOKENS + 1, _BLOCKS):
        yield index.tokens_at(int(first), _BLOCK_TOKENS)


def _samples(index: IndexedCorpus, tokenizer: Optional[LoadedTokenizer]) -> Iterator[SampleDocument]:
    for number in _evenly_spaced(index.documents, SAMPLES):
        ids: List[int] = index.document_beginning(int(number), _SAMPLE_TOKENS).tolist()
        beginning = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        yield SampleDocument(int(number), int(index.document_lengths(number[None])[0]), beginning)
