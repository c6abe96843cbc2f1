"""LayerNorm (Ba et al. 2016) over the hidden dimension."""

from __future__ import annotations

import torch
from torch import nn

from fugaku_gpt import ops
from fugaku_gpt.parallel.gradient_path import widened


class LayerNorm(nn.LayerNorm):
    """PyTorch's module, with weight, bias and their gradients in float32 where the rest is in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., h] → [..., h], of the same type."""
        return ops.layer_norm(x, widened(self.weight), widened(self.bias), self.eps)
