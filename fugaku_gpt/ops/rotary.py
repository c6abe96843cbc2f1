"""Rotary position embeddings (Su et al. 2021, "RoFormer", section 3.4.2), and the order in which attention reads heads.

The halves of a head are the two coordinates that are rotated, as in Llama's published weights: element i with element
i + d / 2. Everything is computed in float32 at least, and rounded once.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from fugaku_gpt.compat.probes import WIDE_DTYPES
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.formulas.rotary import rotary_frequencies
from fugaku_gpt.ops import native
from fugaku_gpt.ops.tensor_pool import pooled_empty

Rotation = Tuple[torch.Tensor, torch.Tensor]  # cosines and sines


@functools.lru_cache(maxsize=4)
def rotation(model: ModelConfig, shards: int, tokens: int, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [shards, 1, tokens, 1, d / 2] of a sequence, whose positions run over shards first."""
    angles = np.outer(np.arange(shards * tokens, dtype=np.float64), rotary_frequencies(model))
    angles = angles.reshape(shards, 1, tokens, 1, model.head_size // 2)
    wide = dtype if dtype in WIDE_DTYPES else torch.float32
    return torch.from_numpy(np.cos(angles)).to(wide), torch.from_numpy(np.sin(angles)).to(wide)


def rotation_at(model: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [1, b, t, 1, d / 2] of the tokens at ``positions`` [b, t] of their sequences."""
    cosines, sines = (x[0, 0, :, 0][positions] for x in rotation(model, 1, model.seq_len, dtype))
    return cosines.unsqueeze(0).unsqueeze(3), sines.unsqueeze(0).unsqueeze(3)


def pack_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Optional[Rotation] = None) -> torch.Tensor:
    """Bring queries, keys and values together as attention reads them, each query head beside its own key and value.

    Args:
        q: [shards, b, tokens, heads, d].
        k, v: [shards, b, tokens, kv heads, d], of which each serves heads / kv heads neighbouring query heads.
        rotary: rotates queries and keys; None: they stay as they are.

    Returns:
        [shards, b, tokens, 3, heads, d]
    """
    packed: torch.Tensor = _PackHeads.apply(q, k, v, rotary)
    return packed


class _PackHeads(torch.autograd.Function):
    """One pass over memory in each direction, which saves nothing."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Optional[Rotation]
    ) -> torch.Tensor:
        ctx.rotary, ctx.kv_heads = rotary, k.shape[3]
        packed = pooled_empty((*q.shape[:3], 3, *q.shape[3:]), q.dtype)
        _rotate_into(packed.select(3, 0), q, rotary, False)
        shared = packed.view(*q.shape[:3], 3, k.shape[3], -1, q.shape[4])  # [..., 3, kv heads, queries of each, d]
        first = shared.select(5, 0)
        _rotate_into(first.select(3, 1), k, rotary, False)
        first.select(3, 2).copy_(v)
        if shared.shape[5] > 1:
            shared[:, :, :, 1:, :, 1:].copy_(first[:, :, :, 1:].unsqueeze(5))
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        q_grad = torch.empty_like(grad.select(3, 0), memory_format=torch.contiguous_format)
        _rotate_into(q_grad, grad.select(3, 0), ctx.rotary, True)
        shared = grad.view(*grad.shape[:4], ctx.kv_heads, -1, grad.shape[5])[:, :, :, 1:]
        summed = shared.squeeze(5) if shared.shape[5] == 1 else _sum_in_float32(shared)
        k_grad = torch.empty_like(summed.select(3, 0), memory_format=torch.contiguous_format)
        _rotate_into(k_grad, summed.select(3, 0), ctx.rotary, True)
        return q_grad, k_grad, summed.select(3, 1), None


def _sum_in_float32(shared: torch.Tensor) -> torch.Tensor:
    """The sum over the query heads that share a key or value, in float32 at least until it is rounded."""
    if shared.dtype in WIDE_DTYPES:
        return shared.sum(5)
    return shared.sum(5, dtype=torch.float32).to(shared.dtype)


def _rotate_into(out: torch.Tensor, x: torch.Tensor, rotary: Optional[Rotation], backwards: bool) -> None:
    """Write x [shards, b, tokens, n, d], rotated by each position's angles, or back by them."""
    if rotary is None:
        out.copy_(x)
        return
    cosines, sines = rotary
    if native.has_native_rotation(out, x, cosines, sines):
        native.rotate_into(out, x, cosines, sines, backwards)
        return
    half = x.shape[-1] // 2
    wide = x if x.dtype == cosines.dtype else x.to(cosines.dtype)
    left, right = wide[..., :half], wide[..., half:]
    sign = -1.0 if backwards else 1.0
    out[..., :half].copy_((left * cosines).addcmul_(right, sines, value=-sign))
    out[..., half:].copy_((right * cosines).addcmul_(left, sines, value=sign))
