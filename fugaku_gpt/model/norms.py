"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension.

Weights, biases and their gradients are float32 where the rest is in 16 bits.
"""

from __future__ import annotations

from typing import Union

import torch
from torch import nn

from fugaku_gpt import ops
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.parallel.gradient_path import widened


class LayerNorm(nn.LayerNorm):
    """PyTorch's module, with weight and bias in float32 at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width] → [..., width], of the same type."""
        return ops.layer_norm(x, widened(self.weight), widened(self.bias), self.eps)


class RMSNorm(nn.Module):
    """RMSNorm over ``width`` elements; it has a weight and no bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width] → [..., width], of the same type."""
        return ops.rms_norm(x, widened(self.weight), self.eps)


Norm = Union[LayerNorm, RMSNorm]


def make_norm(model: ModelConfig, dtype: torch.dtype) -> Norm:
    """Make a norm over the hidden dimension of a model."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden, model.layernorm_eps).to(dtype)
    return LayerNorm(model.hidden, eps=model.layernorm_eps).to(dtype)
