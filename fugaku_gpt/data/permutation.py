"""Permutations as pure functions: they are the same on every machine and rank and with every NumPy.

A generator's ``shuffle`` may change between versions of NumPy; the raw bits of Philox may not (NEP 19).
"""

from __future__ import annotations

import hashlib
from typing import Any, Iterator

import numpy as np

_ROUNDS = 6


def stream_key(*names: object) -> int:
    """A key of 128 bits from the names and numbers that identify a stream of random numbers."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:16], "little")


def permutation(key: int, size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The table of a permutation of [0, size)."""
    draws = np.random.Philox(key=key).random_raw(size)
    return np.argsort(draws, kind="stable")


def random_blocks(key: int, size: int, block: int) -> "Iterator[np.ndarray[Any, np.dtype[np.uint64]]]":
    """Yield the random numbers that :func:`permutation` sorts by, ``block`` of them at a time."""
    generator = np.random.Philox(key=key)
    for first in range(0, size, block):
        yield generator.random_raw(min(block, size - first))


def permuted_index(key: int, size: int, index: int) -> int:
    """The position to which a permutation of [0, size) maps ``index``, without a table.

    A Feistel network over the next even number of bits, walked until it lands inside (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains", sections 4 and 5); fewer than four walks on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right + (round_number << 56) ^ key) & mask)
        index = (left << half) | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """64 well-mixed bits (the finaliser of SplitMix64, Steele et al. 2014, over both halves of 128 bits)."""
    value = (value ^ (value >> 64)) & (2**64 - 1)
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)
