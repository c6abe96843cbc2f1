"""Sums of squares of many numbers, for the norm of a gradient."""

from __future__ import annotations

import functools

import torch

from fugaku_gpt.ops.native import has_native_sum_of_squares, native_sum_of_squares

_NORM_ROW = 1024  # numbers per norm, in their own type; the norms are summed in float64
_DOT_BLOCK = 65536  # numbers per dot product, in their own type: a call costs as much as some thousands of them


def sum_of_squares(x: torch.Tensor) -> float:
    """The sum of squares of [n] float32 or float64 numbers. The method depends on the build and the processor, never on
    timing."""
    if has_native_sum_of_squares(x):
        return native_sum_of_squares(x)
    if not _norms_add_in_lanes():
        return sum(float(torch.dot(block, block)) for block in x.split(_DOT_BLOCK))
    full_rows = x.numel() - x.numel() % _NORM_ROW
    norms = torch.linalg.vector_norm(x[:full_rows].view(-1, _NORM_ROW), dim=1).double()
    tail = x[full_rows:]
    return float(torch.dot(norms, norms)) + float(torch.dot(tail, tail))


@functools.lru_cache(maxsize=None)
def _norms_add_in_lanes() -> bool:
    """Whether this build's kernel for norms of rows sums in the lanes of vectors. With two threads, which share the
    rows, it takes 0.7 of the time of dot products, which they do not share. Older kernels add one number at a time, in
    2.5 times that time; their larger error gives them away."""
    norm = getattr(getattr(torch, "linalg", None), "vector_norm", None)
    if norm is None:
        return False
    # every addition rounds alike: the error is 6.6e-5 one by one, 2.1e-5 in 4 lanes and less in more
    x = torch.full((1, 2**14), 0.1)
    return abs(float(norm(x, dim=1)) ** 2 / (2**14 * float(x[0, 0]) ** 2) - 1.0) < 4e-5
