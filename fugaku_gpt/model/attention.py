"""Causal self-attention: the layer, and its definition, by which the fast implementations are checked."""

from __future__ import annotations

import math
from typing import Optional, Union

import numpy as np
import torch
from torch import nn

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.model.attention_core import DropoutMaskFn, attend
from fugaku_gpt.model.cells import Cells
from fugaku_gpt.model.documents import Documents
from fugaku_gpt.model.dropout import dropped_share, keep_mask
from fugaku_gpt.model.kv_cache import CachedLayer
from fugaku_gpt.model.norms import RMSNorm
from fugaku_gpt.parallel.tensor import ColumnParallelLinear, Prepare, RowParallelLinear, column_parallel_pair

Packing = Union[Cells, Documents]  # the keys that each token of a batch sees, where that is not all before it


def attend_naively(
    packed: torch.Tensor,
    heads: int,
    keep_flags: Optional[DropoutMaskFn] = None,
    probability: float = 0.0,
    save_flags: bool = True,
    ranges: Optional[ops.KeyRanges] = None,
) -> torch.Tensor:
    """Compute attention by its definition, softmax(q kᵀ / √d, keys in range) v; arguments: see :func:`attend`."""
    shards, b, tokens, slots, d = packed.shape
    s, kv_heads = shards * tokens, (slots - heads) // 2
    x = packed.permute(1, 3, 0, 2, 4).reshape(b, slots, s, d)
    q, k, v = x.split((heads, kv_heads, kv_heads), 1)
    k, v = (shared.repeat_interleave(heads // kv_heads, dim=1) for shared in (k, v))
    scores = q.matmul(k.transpose(-2, -1)) / math.sqrt(d)  # [b, heads, s, s]
    ranges = ops.KeyRanges.causal(s) if ranges is None else ranges
    positions = torch.arange(s)
    is_seen = (positions >= ranges.first.unsqueeze(-1)) & (positions < ranges.end.unsqueeze(-1))  # [b or 1, s, s]
    sees_any = is_seen.any(-1, keepdim=True).unsqueeze(1)
    probabilities = torch.softmax(scores.masked_fill(~is_seen.unsqueeze(1) & sees_any, -math.inf), dim=-1)
    probabilities = probabilities.masked_fill(~sees_any, 0.0)
    if keep_flags is not None:
        probabilities = probabilities * keep_flags().to(packed.dtype) / (1.0 - probability)
    y = probabilities.matmul(v)
    return y.view(b, heads, shards, tokens, d).permute(2, 0, 3, 1, 4)


def pack_naively(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Optional[ops.Rotation] = None
) -> torch.Tensor:
    """Do what :func:`fugaku_gpt.ops.pack_heads` does, by the definition of a rotation."""

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if rotary is None:
            return x
        cosines, sines = rotary
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosines - right * sines, right * cosines + left * sines], -1).to(x.dtype)

    return torch.cat([rotated(q), rotated(k), v], 3)


class CausalSelfAttention(nn.Module):
    """Multi-head attention: [b, s, h] → [b, s, h]; each of the ``tp`` ranks has heads / tp heads, and the heads of keys
    and values that these share (Ainslie et al. 2023, "GQA").

    Scores and probabilities ([s, s] for each head) are never saved for the backward pass; with ``recompute_core`` the
    flags of their dropout are not saved either (Korthikanti et al. 2022, section 5).
    """

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        dtype: torch.dtype,
        seed: int,
        site: int,
        sequence_parallel: bool = False,
        recompute_core: bool = False,
        reference: bool = False,
    ) -> None:
        """Create the layer. With ``reference``, attention is computed by its definition, to check faster ways."""
        super().__init__()
        has_bias, width = model.biases != "none", model.query_width
        if model.kv_head_count == model.heads:
            self.qkv = ColumnParallelLinear(model.hidden, width, tp, dtype, 3, sequence_parallel, has_bias=has_bias)
        else:
            kv_width = model.local_kv_heads(tp.size) * tp.size * model.head_size  # copies included
            self.q = ColumnParallelLinear(model.hidden, width, tp, dtype, 1, sequence_parallel, has_bias=has_bias)
            self.kv = ColumnParallelLinear(model.hidden, kv_width, tp, dtype, 2, sequence_parallel, has_bias=has_bias)
        if model.qk_norm:
            self.q_norm = RMSNorm(model.head_size, model.layernorm_eps).to(dtype)
            self.k_norm = RMSNorm(model.head_size, model.layernorm_eps).to(dtype)
        self.out = RowParallelLinear(width, model.hidden, tp, dtype, sequence_parallel, has_bias=model.biases == "all")
        self._local_heads = model.heads // tp.size
        self._tp_size = tp.size
        self._first_head = tp.rank * self._local_heads
        self._model = model
        self._seed = seed
        self._site = site
        self._save_flags = not recompute_core
        self._reference = reference

    def forward(
        self,
        x: torch.Tensor,
        first_sample: int,
        norm: Optional[Prepare] = None,
        cached: Optional[CachedLayer] = None,
        packing: Optional[Packing] = None,
    ) -> torch.Tensor:
        """Apply the layer. ``first_sample`` keys dropout; ``norm`` is applied to the input, and again in the backward
        pass; with ``cached``, tokens also attend to those before them, and join them; the tokens are those of a
        sequence, of which each sees those before it, or with ``packing`` those of its document, or of its grid."""
        b, tokens, _ = x.shape  # tokens of each sample: all s, or under sequence parallelism s / shards
        heads, d = self._local_heads, self._model.head_size
        packed = self._queries_keys_values(x, norm, cached, packing)
        if cached is not None:
            q, k, v = packed.split([heads, *[self._model.local_kv_heads(self._tp_size)] * 2], 3)
            cached.append(k[0], v[0])
            if not cached.new.is_prefill:  # a prefill's tokens attend to one another alone, as in training
                return self.out(cached.attend(q[0]).reshape(b, tokens, heads * d))
        shards = packed.shape[0]
        probability, keep_flags = 0.0, None
        if self.training and self._model.attention_dropout > 0.0:
            probability = dropped_share(self._model.attention_dropout)

            def keep_flags() -> torch.Tensor:
                return self._keep_flags(b, shards * tokens, first_sample)

        function = attend_naively if self._reference else attend
        ranges = packing.ranges if packing is not None else None
        y = function(packed, heads, keep_flags, probability, self._save_flags, ranges)
        return self.out(y.reshape(shards * b, tokens, heads * d))

    def _queries_keys_values(
        self, x: torch.Tensor, norm: Optional[Prepare], cached: Optional[CachedLayer], packing: Optional[Packing]
    ) -> torch.Tensor:
        """Return queries, keys and values as attention takes them, [shards or 1, b, tokens, heads + 2 kv heads,
        d]."""
        (b, tokens, _), model = x.shape, self._model
        heads, d = self._local_heads, model.head_size
        if model.kv_head_count == model.heads:
            qkv: torch.Tensor = self.qkv(x, norm).view(-1, b, tokens, 3 * heads, d)
            if model.positions == "learned" and not model.qk_norm:
                return qkv
            q, k, v = qkv.split(heads, 3)
        else:
            queries, keys_values = column_parallel_pair(self.q, self.kv, x, norm)
            q = queries.view(-1, b, tokens, heads, d)
            k, v = keys_values.view(*q.shape[:3], 2, -1, d).unbind(3)
        if model.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        pack = pack_naively if self._reference else ops.pack_heads
        if packing is not None and packing.rotation is not None:  # each sequence has its own, as a shard has
            by_sequence = [part.reshape(-1, 1, *part.shape[2:]) for part in (q, k, v)]
            packed = pack(by_sequence[0], by_sequence[1], by_sequence[2], packing.rotation)
            return packed.view(*q.shape[:3], *packed.shape[3:])
        if cached is not None:  # so it has here
            rotary = cached.new.rotation(model, x.dtype) if model.positions == "rope" else None
            return pack(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), rotary).transpose(0, 1)
        return pack(q, k, v, ops.rotation(model, q.shape[0], tokens, x.dtype) if model.positions == "rope" else None)

    def _keep_flags(self, b: int, s: int, first_sample: int) -> torch.Tensor:
        """Return the flags of dropout [b, local heads, s, s], keyed by (sample, head of the whole model, position)."""
        probability = self._model.attention_dropout
        heads, count = self._model.heads, self._local_heads * s * s
        flags = [
            keep_mask(
                self._seed, self._site, ((first_sample + i) * heads + self._first_head) * s * s, count, probability
            )
            for i in range(b)
        ]
        return torch.from_numpy(np.concatenate(flags)).view(b, self._local_heads, s, s)
