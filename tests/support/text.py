"""Samples of real tokens without a tokenizer: the bytes of a few standard-library sources."""

from __future__ import annotations

import argparse
import ast
import inspect
from typing import Any

import numpy as np

VOCABULARY = 256


class ByteSamples:
    """Numbered samples of byte ids, consecutive in real text, which starts over at its end."""

    def __init__(self, seq_len: int) -> None:
        text = "".join(inspect.getsource(module) for module in (argparse, ast)).encode("utf-8")
        self._tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self._seq_len = seq_len

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Token ids [count, seq_len + 1] of the samples from ``first`` on."""
        room = len(self._tokens) - self._seq_len - 1
        starts = [(number * self._seq_len) % room for number in range(first, first + count)]
        return np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
