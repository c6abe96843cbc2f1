"""Causal self-attention: three kernels for the same function; ``layout/memory.py`` says which to take when."""

from __future__ import annotations

import math
from typing import Optional

import numpy as np
import torch
from torch import nn

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.layout.memory import wants_fused_kernel
from fugaku_gpt.model.dropout import keep_mask, scaled_mask
from fugaku_gpt.model.recompute import recomputed
from fugaku_gpt.parallel.tensor import ColumnParallelLinear, RowParallelLinear


def attend_naively(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, kept as the judge of the others: softmax(q kᵀ / √d, no future) v; all [b, heads, s, d]."""
    s, d = q.shape[-2:]
    scores = q.matmul(k.transpose(-2, -1)) / math.sqrt(d)  # [b, heads, s, s]
    future = torch.ones(s, s, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1).matmul(v)


def attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's kernel, which never stores the [s, s] probabilities."""
    return compat.fused_attention(q, k, v)


def attend_batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, future: torch.Tensor, drop: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Batched matrix products over b * heads; ``future`` [s, s] is 0 or -inf, ``drop`` [b * heads, s, s] the dropout
    factors."""
    b, heads, s, d = q.shape
    q, k, v = (x.reshape(b * heads, s, d) for x in (q, k, v))
    scores = compat.baddbmm(future.expand(b * heads, s, s), q, k.transpose(1, 2), alpha=1.0 / math.sqrt(d))
    probabilities = compat.softmax(scores)
    if drop is not None:
        probabilities = probabilities * drop
    return compat.bmm(probabilities, v).view(b, heads, s, d)


def uses_fused_kernel(model: ModelConfig) -> bool:
    """Whether attention is PyTorch's own kernel, where this PyTorch has one."""
    return compat.scaled_dot_product_attention is not None and wants_fused_kernel(model)


class CausalSelfAttention(nn.Module):
    """Multi-head attention: [b, s, h] → [b, s, h]; ``tp`` ranks have heads / tp heads each.

    With ``recompute_core`` the scores, their softmax and its dropout ([s, s] for each head) are not kept for the
    backward pass (Korthikanti et al. 2022, section 5). The fused kernel never keeps them.
    """

    future: torch.Tensor

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        dtype: torch.dtype,
        seed: int,
        site: int,
        sequence_parallel: bool = False,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        self.qkv = ColumnParallelLinear(model.hidden, model.hidden, tp, dtype, 3, sequence_parallel)
        self.out = RowParallelLinear(model.hidden, model.hidden, tp, dtype, sequence_parallel)
        self._heads_here = model.heads // tp.size
        self._first_head = tp.rank * self._heads_here
        self._model = model
        self._seed = seed
        self._site = site
        self._fused = uses_fused_kernel(model)
        self._recompute_core = recompute_core and not self._fused
        if not self._fused:
            future = torch.full((model.seq_len, model.seq_len), -math.inf).triu(1)
            self.register_buffer("future", future.to(dtype), persistent=False)

    def forward(self, x: torch.Tensor, first_sample: int) -> torch.Tensor:
        b, here, _ = x.shape  # tokens of each sample: all s, or under sequence parallelism s / parts
        heads, d = self._heads_here, self._model.head_size
        qkv = self.qkv(x).view(-1, b, here, 3, heads, d)  # the first dimension is parts, or 1
        parts = qkv.shape[0]
        q, k, v = (one.reshape(b, heads, parts * here, d) for one in qkv.permute(3, 1, 4, 0, 2, 5).unbind(0))

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._core(q, k, v, first_sample)

        y = recomputed(core, q, k, v) if self._recompute_core else core(q, k, v)  # [b, heads, s, d]
        y = y.view(b, heads, parts, here, d).permute(2, 0, 3, 1, 4).reshape(parts * b, here, heads * d)
        return self.out(y)

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_sample: int) -> torch.Tensor:
        if self._fused:
            return attend_fused(q, k, v)
        b, _, s, _ = q.shape
        return attend_batched(q, k, v, self.future[:s, :s], self._drop(b, s, first_sample, q))

    def _drop(self, b: int, s: int, first_sample: int, like: torch.Tensor) -> Optional[torch.Tensor]:
        """Dropout factors [b * heads here, s, s], keyed by (sample, head of the whole model, position)."""
        probability = self._model.attention_dropout
        if probability == 0.0 or not self.training:
            return None
        heads, count = self._model.heads, self._heads_here * s * s
        kept = [
            keep_mask(
                self._seed, self._site, ((first_sample + i) * heads + self._first_head) * s * s, count, probability
            )
            for i in range(b)
        ]
        return scaled_mask(np.concatenate(kept), probability, like).view(b * self._heads_here, s, s)
