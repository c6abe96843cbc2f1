"""Random inputs of kernels."""

from __future__ import annotations

import torch

SIXTEEN_BITS = [torch.bfloat16, torch.float16]


def random(*shape: int) -> torch.Tensor:
    """Normally distributed numbers, the same at each call for the same number of dimensions."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
