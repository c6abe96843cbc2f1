"""Texts whose loss is to be computed, as token ids, the windows that they are cut into, and their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.errors import DataError

TokenIds = Union[Sequence[int], "np.ndarray[Any, np.dtype[Any]]"]


@dataclass(frozen=True)
class ScoredText:
    """Token ids, of which those from ``first`` on are predicted from all before them.

    Attributes:
        name: how it is called in results.
        ids: the tokens, context included.
        first: index of the first predicted token, at least 1.
        bytes: bytes of the predicted text in UTF-8; None where they are not known.
    """

    name: str
    ids: TokenIds
    first: int
    bytes: Optional[int]


def ids_behind(before: int, ids: "np.ndarray[Any, np.dtype[Any]]") -> "np.ndarray[Any, np.dtype[Any]]":
    """Return token ids behind another one, in the type of the ids where that can hold it: a corpus may be large."""
    dtype = ids.dtype if before <= np.iinfo(ids.dtype).max else np.dtype(np.int64)
    return np.concatenate((np.array([before], dtype=dtype), ids.astype(dtype, copy=False)))


def require_vocabulary(name: str, texts: Sequence[ScoredText], vocab_size: int) -> None:
    """Check that a model has the tokens of texts.

    Args:
        name: of the texts together, for the message.

    Raises:
        DataError: it has not.
    """
    largest = max(int(text.ids.max() if isinstance(text.ids, np.ndarray) else max(text.ids)) for text in texts)
    if largest >= vocab_size:
        raise DataError(
            f"{name}: has token {largest}, more than model.vocab_size {vocab_size} allows: it was encoded by another "
            "model's tokenizer"
        )


class TextLoss(NamedTuple):
    """Loss of a text.

    Attributes:
        name: the text's.
        nats: sum of the tokens' cross-entropies.
        tokens: number of predicted tokens.
        bytes: as in :class:`ScoredText`.
    """

    name: str
    nats: float
    tokens: int
    bytes: Optional[int]

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> Optional[float]:
        """Bits for each byte of the text, which models with different tokenizers can be compared by."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def documents_of_corpus(
    path: str, end: int, decode: Optional[Callable[[List[int]], str]] = None, count: Optional[int] = None
) -> List[ScoredText]:
    """Return the documents of a corpus as they are stored, with the token that ends each.

    Args:
        end: the token that ends a document, which comes before each, too.
        decode: makes text of token ids, by which the bytes of each document are counted; None: they are not.
        count: documents to take, from the first on; None: all.

    Raises:
        DataError: there is no corpus, or it is damaged, or holds no token.
    """
    index = open_corpus(path).index
    documents = []
    for number in range(index.documents if count is None else min(count, index.documents)):
        ids = ids_behind(end, index.document(number))
        if len(ids) > 1:
            size = len(decode(ids.tolist()).encode("utf-8")) if decode is not None else None
            documents.append(ScoredText(f"{number}", ids, 1, size))
    if not documents:
        raise DataError(f"{path}: none of its documents has a token")
    return documents


class Window(NamedTuple):
    """A part of a text: ids [start, stop), of which those from ``first`` on are predicted here."""

    text: int
    start: int
    stop: int
    first: int


def windows_of(texts: Sequence[ScoredText], seq_len: int, stride: int) -> List[Window]:
    """Cut texts into windows of at most ``seq_len`` inputs; every token is predicted once, in the first window that
    reaches it. Windows begin ``stride`` tokens apart, so that with a smaller stride than ``seq_len`` tokens have more
    context.

    Raises:
        ValueError: the stride is not between 1 and ``seq_len``.
    """
    if not 1 <= stride <= seq_len:
        raise ValueError(f"stride {stride}: valid: 1 to {seq_len}")
    windows = []
    for number, text in enumerate(texts):
        length, first = len(text.ids), text.first
        # as much context as one window has room for; or the beginning, with what context a stride leaves
        fits = length - first <= seq_len
        start = max(0, length - seq_len - 1 if fits else first - 1 - (seq_len - stride))
        while first < length:
            stop = min(length, start + seq_len + 1)
            windows.append(Window(number, start, stop, first))
            first, start = stop, start + stride
    return windows
