"""Numbers to compute with."""

from __future__ import annotations

import torch

SIXTEEN_BITS = [torch.bfloat16, torch.float16]


def random(*shape: int) -> torch.Tensor:
    """Normally distributed, the same each time for as many dimensions."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
