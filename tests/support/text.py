"""Samples of real tokens without a tokenizer: the bytes of a few standard-library sources."""

from __future__ import annotations

import argparse
import ast
import inspect
from typing import Any

import numpy as np

from fugaku_gpt.data.packed_batch import PackedBatch

VOCABULARY = 256
_MEAN_DOCUMENT = 7  # bytes, so that short sequences have several


class ByteSamples:
    """Numbered samples of byte ids, consecutive in real text, which starts over at its end."""

    def __init__(self, seq_len: int) -> None:
        text = "".join(inspect.getsource(module) for module in (argparse, ast)).encode("utf-8")
        self._tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self._begins = np.random.RandomState(7).random_sample(len(self._tokens)) < 1 / _MEAN_DOCUMENT
        self._seq_len = seq_len

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Token ids [count, seq_len + 1] of the samples from ``first`` on."""
        return self.packed_batch(first, count).tokens

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        """The same, with documents that begin anywhere in the text."""
        room = len(self._tokens) - self._seq_len - 1
        starts = [(number * self._seq_len) % room for number in range(first, first + count)]
        places = np.array(starts)[:, np.newaxis] + np.arange(self._seq_len + 1)
        return PackedBatch(self._tokens[places], self._begins[places])
