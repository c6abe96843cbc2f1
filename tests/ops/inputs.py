"""Random inputs of kernels."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fugaku_gpt.ops import KeyRanges

SIXTEEN_BITS = [torch.bfloat16, torch.float16]


def random(*shape: int) -> torch.Tensor:
    """Normally distributed numbers, the same at each call for the same number of dimensions."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Normally distributed numbers in float64, the same at each call with the same seed."""
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def key_ranges(samples: int, length: int) -> "st.SearchStrategy[KeyRanges]":
    """Every kind of ranges of keys, and ranges that merely do not decrease, some of them empty."""
    positions = st.integers(0, length)
    starts = st.lists(st.integers(0, length - 1), max_size=4).map(lambda more: sorted({0, *more}))
    return st.one_of(
        st.just(KeyRanges.causal(length)),
        st.lists(positions, min_size=samples, max_size=samples).map(
            lambda lengths: KeyRanges.bidirectional(lengths, length)
        ),
        st.builds(
            lambda begins, is_causal: KeyRanges.documents(begins, length, is_causal),
            st.lists(starts, min_size=samples, max_size=samples),
            st.booleans(),
        ),
        st.builds(lambda seed: _any_ranges(seed, samples, length), st.integers(0, 999)),
    )


def _any_ranges(seed: int, samples: int, length: int) -> KeyRanges:
    generator = torch.Generator().manual_seed(seed)
    shape = (1 if seed % 3 == 0 else samples, length)
    first, second = (torch.randint(length + 1, shape, generator=generator).int().sort(1).values for _ in range(2))
    return KeyRanges(torch.min(first, second), torch.max(first, second), length)
