"""Causal attention by tiles of queries, as one autograd function that saves only its input.

Compiled kernels do all of it if there are any; the rest of this file is the implementation with PyTorch's operators.
The queries of a tile are multiplied with the keys up to the tile's end, so that what lies above the diagonal is not
computed. The backward pass computes the probabilities again, one product of seven, instead of saving [s, s] of them for
each head (Dao et al. 2022, "FlashAttention", section 3.1). The products are batched over the heads of one or more
samples, as many as leave the scores in the caches of all threads; the scores of all tiles share the same memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Iterator, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from fugaku_gpt import ops
from fugaku_gpt.kernels.attention_tiling import attention_tiling, needs_separate_accumulator

DropoutMaskFn = Callable[[], torch.Tensor]


def attend(
    qkv: torch.Tensor, keep_flags: Optional[DropoutMaskFn] = None, probability: float = 0.0, save_flags: bool = True
) -> torch.Tensor:
    """Compute softmax(q kᵀ / √d, no future) v.

    Args:
        qkv: [shards, b, s / shards, 3, heads, d]: query, key and value; positions run over shards first, then inside.
        keep_flags: returns the flags of attention dropout [b, heads, s, s], True for each probability that is not
            dropped; must return the same each time.
        probability: probability of being dropped; the remaining ones are scaled by 1 / (1 - probability).
        save_flags: save the flags for the backward pass instead of computing them again there.

    Returns:
        [shards, b, s / shards, heads, d]
    """
    function = _CompiledAttention if ops.has_native_attention(qkv) else _TiledAttention
    y: torch.Tensor = function.apply(
        qkv, keep_flags, 1.0 / (1.0 - probability) if keep_flags is not None else 1.0, save_flags
    )
    return y


class _CompiledAttention(torch.autograd.Function):
    """Attention by our own compiled kernels. Besides the input it saves the output, which the next layer saves anyway,
    and a number for each query and head."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, keep_flags: Optional[DropoutMaskFn], factor: float, save_flags: bool
    ) -> torch.Tensor:
        flags = keep_flags() if keep_flags is not None else None
        y, log_sums = ops.attention(qkv, flags, factor)
        ctx.save_for_backward(qkv, y, log_sums, *([flags] if flags is not None and save_flags else []))
        ctx.keep_flags, ctx.factor = keep_flags, factor
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[torch.Tensor, None, None, None]:
        qkv, y, log_sums, *saved = ctx.saved_tensors
        flags = saved[0] if saved else ctx.keep_flags() if ctx.keep_flags is not None else None
        return ops.attention_gradient(y_grad, qkv, y, log_sums, flags, ctx.factor), None, None, None


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, keep_flags: Optional[DropoutMaskFn], factor: float, save_flags: bool
    ) -> torch.Tensor:
        flags = keep_flags() if keep_flags is not None else None
        y = torch.empty_like(qkv[:, :, :, 0], memory_format=torch.contiguous_format)
        work = _Workspace(qkv, flags is not None)
        for group in work.groups():
            q, k, v = work.queries_keys_values(qkv, group)
            out = torch.empty_like(q)
            for low, high in work.query_tiles():
                p = work.probabilities(q, k, low, high)
                if flags is not None:
                    p.mul_(work.flags(flags, group, low, high))
                out[:, low:high].copy_(work.rows(p, v[:, :high]))
            if flags is not None:
                out.mul_(factor)
            work.store(out, y.unsqueeze(3), group)
        ctx.save_for_backward(qkv, *([flags] if flags is not None and save_flags else []))
        ctx.keep_flags, ctx.factor = keep_flags, factor
        return y

    @staticmethod
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[torch.Tensor, None, None, None]:
        qkv, *saved = ctx.saved_tensors
        flags = saved[0] if saved else ctx.keep_flags() if ctx.keep_flags is not None else None
        grad = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        work = _Workspace(qkv, flags is not None)
        for group in work.groups():
            q, k, v = work.queries_keys_values(qkv, group)
            (out_grad,) = work.copy_of(y_grad.unsqueeze(3), group)
            if flags is not None:
                out_grad.mul_(ctx.factor)
            q_grad, k_grad, v_grad = grads = q.new_empty(3, *q.shape)
            for (
                low,
                high,
            ) in work.query_tiles():  # the first tile reaches all keys, and sets the sums to which the next ones add
                p = work.probabilities(q, k, low, high)
                queries, above = q[:, low:high], out_grad[:, low:high]
                p_grad = torch.bmm(above, v[:, :high].transpose(1, 2), out=work.scores(p.shape, 1))
                if flags is None:
                    dropped = p
                else:
                    mask = work.flags(flags, group, low, high)
                    p_grad.mul_(mask)
                    dropped = mask.mul_(p)
                work.add_product(v_grad[:, :high], dropped.transpose(1, 2), above)
                scores_grad = ops.softmax_gradient_(p_grad, p)
                work.add_product(k_grad[:, :high], scores_grad.transpose(1, 2), queries)
                q_grad[:, low:high].copy_(work.rows(scores_grad, k[:, :high]))
            q_grad.mul_(work.scale)
            work.store(grads, grad, group)
        return grad, None, None, None


Group = Tuple[slice, slice]  # samples, heads


class _Workspace:
    """Memory for a group of heads, and the order of the work. All of it is float32 if an operation lacks a good kernel
    for a 16-bit type."""

    def __init__(self, qkv: torch.Tensor, drops: bool) -> None:
        shards, self.samples, tokens, _, self.heads, self._width = qkv.shape
        self.length = shards * tokens
        self._shards, self._tokens = shards, tokens
        self.scale = 1.0 / math.sqrt(self._width)
        self._like = qkv.new_empty(0, dtype=ops.attention_dtype(qkv.dtype))
        narrow = self._like.element_size() == 2
        tiling = attention_tiling(self.length, self.samples, self.heads, narrow, torch.get_num_threads())
        self._query_tile, self._samples_at_once, self._heads_at_once = tiling.queries, tiling.samples, tiling.heads
        self._future = _future(self._query_tile, self._like.dtype)
        products = tiling.products
        self._rows = self._like.new_empty(products * self._query_tile * self._width)
        self._sums = self._like.new_empty(
            products * self.length * self._width if needs_separate_accumulator(tiling, self.length) else 0
        )
        self._scores = self._like.new_empty(3 if drops else 2, products * self._query_tile * self.length)

    def groups(self) -> Iterator[Group]:
        """Iterate over the groups of samples and heads whose products are computed as one batch."""
        for sample in range(0, self.samples, self._samples_at_once):
            samples = slice(sample, min(sample + self._samples_at_once, self.samples))
            for head in range(0, self.heads, self._heads_at_once):
                yield samples, slice(head, min(head + self._heads_at_once, self.heads))

    def query_tiles(self) -> Iterator[Tuple[int, int]]:
        """Iterate over (first query, end) of each tile, from the last to the first."""
        for low in reversed(range(0, self.length, self._query_tile)):
            yield low, min(low + self._query_tile, self.length)

    def queries_keys_values(self, qkv: torch.Tensor, group: Group) -> torch.Tensor:
        """Return query, key and value of a group, [3, products, s, d], the queries scaled."""
        copy = self.copy_of(qkv, group)
        copy[0].mul_(self.scale)
        return copy

    def copy_of(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Copy a group of [shards, b, s / shards, n, heads, d] to [n, products, s, d]."""
        samples, heads = _sizes(group)
        copy = self._like.new_empty(x.shape[3], samples * heads, self.length, self._width)
        self._grouped_view(copy, group).copy_(_of_group(x, group))
        return copy

    def store(self, x: torch.Tensor, out: torch.Tensor, group: Group) -> None:
        """Copy [n, products, s, d] back to a group of ``out``, [shards, b, s / shards, n, heads, d]."""
        _of_group(out, group).copy_(self._grouped_view(x, group))

    def _grouped_view(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view(-1, *_sizes(group), self._shards, self._tokens, self._width)

    def scores(self, shape: Tuple[int, ...], index: int) -> torch.Tensor:
        """Return the ``index``-th buffer for scores in this shape, such as [products, queries, keys]; buffers are
        reused."""
        return self._scores[index, : math.prod(shape)].view(shape)

    def rows(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the product x y [products, queries, d] in contiguous memory, because kernels for 16-bit types are slow
        to write with gaps."""
        shape = (*x.shape[:2], self._width)
        return torch.bmm(x, y, out=self._rows[: math.prod(shape)].view(shape))

    def add_product(self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the product x y to ``out`` [products, keys, d]; the product for all keys comes first, and overwrites it.

        PyTorch's ``baddbmm`` takes the heads one by one if ``out`` has gaps, and shares each among the threads. It is
        used for 16-bit types only, where it alone adds before it rounds.
        """
        if out.shape[1] == self.length:
            torch.bmm(x, y, out=out)
        elif out.element_size() == 2:
            out.baddbmm_(x, y)
        else:
            out.add_(torch.bmm(x, y, out=self._sums[: out.numel()].view(out.shape)))

    def probabilities(self, q: torch.Tensor, k: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Return the probabilities of one tile of queries, [low, high), for the keys up to its end."""
        scores = torch.bmm(q[:, low:high], k[:, :high].transpose(1, 2), out=self.scores((len(q), high - low, high), 0))
        scores[:, :, low:].add_(self._future[: high - low, : high - low])
        return ops.softmax_(scores)

    def flags(self, flags: torch.Tensor, group: Group, low: int, high: int) -> torch.Tensor:
        """Return a tile's dropout flags as numbers."""
        numbers = self.scores((*_sizes(group), high - low, high), 2)
        return numbers.copy_(flags[group[0], group[1], low:high, :high]).view(-1, high - low, high)


def _sizes(group: Group) -> Tuple[int, int]:
    """Return the numbers of samples and of heads; their product is the number of products in a batch."""
    samples, heads = group
    return samples.stop - samples.start, heads.stop - heads.start


def _of_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the view of a group: [shards, b, s / shards, n, heads, d] → [n, samples, heads of the group, shards,
    s / shards, d]."""
    return x[:, group[0], :, :, group[1]].permute(3, 1, 4, 0, 2, 5)


@functools.lru_cache(maxsize=8)
def _future(tile: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the causal mask [tile, tile]: -inf above the diagonal, else 0."""
    return torch.full((tile, tile), -math.inf).triu(1).to(dtype)
