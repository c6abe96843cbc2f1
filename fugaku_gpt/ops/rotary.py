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
    """Cosines and sines [b, 1, t, 1, d / 2] of the tokens at ``positions`` [b, t] of their sequences, for heads
    [b, 1, t, heads, d]."""
    (b, t), tables = positions.shape, rotation(model, 1, model.seq_len, dtype)
    cosines, sines = (table.view(model.seq_len, -1)[positions].view(b, 1, t, 1, -1) for table in tables)
    return cosines, sines


def rotation_in_grid(model: ModelConfig, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [b, 1, s, 1, d / 2] of the cells in ``rows`` and ``columns`` [b, s] of their grids, for heads
    [b, 1, s, heads, d]: the first half of the pairs of coordinates turns by the row, the second by the column."""
    (b, s), tables = rows.shape, _grid_tables(model, dtype)
    cosines, sines = (torch.cat([table[rows], table[columns]], -1).view(b, 1, s, 1, -1) for table in tables)
    return cosines, sines


@functools.lru_cache(maxsize=4)
def _grid_tables(model: ModelConfig, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [side, d / 4] of the rows of a grid, which are those of its columns."""
    angles = np.outer(np.arange(model.grid_side, dtype=np.float64), rotary_frequencies(model))
    wide = dtype if dtype in WIDE_DTYPES else torch.float32
    return torch.from_numpy(np.cos(angles)).to(wide), torch.from_numpy(np.sin(angles)).to(wide)


def pack_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Optional[Rotation] = None) -> torch.Tensor:
    """Bring queries, keys and values together as attention reads them.

    Args:
        q: [shards, b, tokens, heads, d].
        k, v: [shards, b, tokens, kv heads, d], of which each serves heads / kv heads neighbouring query heads.
        rotary: rotates queries and keys; None: they stay as they are.

    Returns:
        [shards, b, tokens, heads + 2 kv heads, d]: queries, keys, values
    """
    if not torch.is_grad_enabled():  # without what autograd asks for
        return _packed(q, k, v, rotary)
    packed: torch.Tensor = _PackHeads.apply(q, k, v, rotary)
    return packed


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Optional[Rotation]) -> torch.Tensor:
    heads = (q.shape[3], k.shape[3], v.shape[3])
    packed = pooled_empty((*q.shape[:3], sum(heads), q.shape[4]), q.dtype)
    queries, keys, values = packed.split(heads, 3)
    _rotate_into(queries, q, rotary, False)
    _rotate_into(keys, k, rotary, False)
    values.copy_(v)
    return packed


class _PackHeads(torch.autograd.Function):
    """One pass over memory in each direction, which saves nothing."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Optional[Rotation]
    ) -> torch.Tensor:
        ctx.rotary, ctx.heads = rotary, (q.shape[3], k.shape[3], v.shape[3])
        return _packed(q, k, v, rotary)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        queries_grad, keys_grad, v_grad = grad.split(ctx.heads, 3)
        q_grad, k_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries_grad, keys_grad))
        _rotate_into(q_grad, queries_grad, ctx.rotary, True)
        _rotate_into(k_grad, keys_grad, ctx.rotary, True)
        return q_grad, k_grad, v_grad, None


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
