"""Texts whose loss is to be computed, as token ids, the windows that they are cut into, and their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Sequence, Union

import numpy as np

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
