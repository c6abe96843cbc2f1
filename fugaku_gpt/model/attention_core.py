"""Attention by tiles of queries, as one autograd function that saves only its input.

Each query sees a range of keys (:class:`fugaku_gpt.ops.KeyRanges`): those up to itself, those of its own document,
those that are no padding. Heads of queries may share heads of keys and values, which are not repeated for them.
Compiled kernels do all of it if there are any; the rest of this file is the implementation with PyTorch's operators.

The queries of a tile are multiplied with the keys that any of them sees, so that most of what the others hide is not
computed. The backward pass computes the probabilities again, one product of seven, instead of saving [s, s] of them for
each head (Dao et al. 2022, "FlashAttention", section 3.1). The products are batched over the heads of keys of one or
more samples, as many as leave the scores in the caches of all threads; the scores of all tiles share the same memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from fugaku_gpt import ops
from fugaku_gpt.kernels.attention_tiling import attention_tiling, needs_separate_accumulator

DropoutMaskFn = Callable[[], torch.Tensor]


def attend(
    packed: torch.Tensor,
    heads: int,
    keep_flags: Optional[DropoutMaskFn] = None,
    probability: float = 0.0,
    save_flags: bool = True,
    ranges: Optional[ops.KeyRanges] = None,
) -> torch.Tensor:
    """Compute softmax(q kᵀ / √d, keys in range) v.

    Args:
        packed: [shards, b, s / shards, heads + 2 kv heads, d]: queries, keys and values; positions run over shards
            first, then inside. Each head of keys and values serves heads / kv heads neighbouring heads of queries.
        heads: number of heads of queries.
        keep_flags: returns the flags of attention dropout [b, heads, s, s], True for each probability that is not
            dropped; must return the same each time.
        probability: probability of being dropped; the remaining ones are scaled by 1 / (1 - probability).
        save_flags: save the flags for the backward pass instead of computing them again there.
        ranges: the keys that each query sees; default: those up to its own position. The output of a query that sees
            none is 0.

    Returns:
        [shards, b, s / shards, heads, d]

    Raises:
        ValueError: the ranges are not those of b samples of s tokens.
    """
    length = packed.shape[0] * packed.shape[2]
    ranges = ops.KeyRanges.causal(length) if ranges is None else ranges
    if not ranges.suits(packed.shape[1], length, length):
        raise ValueError(f"these ranges of keys are not those of {packed.shape[1]} samples of {length} tokens")
    function = _CompiledAttention if ops.has_native_attention(packed, heads) else _TiledAttention
    factor = 1.0 / (1.0 - probability) if keep_flags is not None else 1.0
    y: torch.Tensor = function.apply(packed, heads, ranges, keep_flags, factor, save_flags)
    return y


class _CompiledAttention(torch.autograd.Function):
    """Attention by our own compiled kernels. Besides the input it saves the output, which the next layer saves anyway,
    and a number for each query and head."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: torch.Tensor,
        heads: int,
        ranges: ops.KeyRanges,
        keep_flags: Optional[DropoutMaskFn],
        factor: float,
        save_flags: bool,
    ) -> torch.Tensor:
        flags = keep_flags() if keep_flags is not None else None
        y, log_sums = ops.attention(packed, heads, ranges, flags, factor)
        ctx.save_for_backward(packed, y, log_sums, *([flags] if flags is not None and save_flags else []))
        ctx.ranges, ctx.keep_flags, ctx.factor = ranges, keep_flags, factor
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        packed, y, log_sums, *saved = ctx.saved_tensors
        flags = saved[0] if saved else ctx.keep_flags() if ctx.keep_flags is not None else None
        grad = ops.attention_gradient(y_grad, packed, y, log_sums, ctx.ranges, flags, ctx.factor)
        return grad, None, None, None, None, None


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: torch.Tensor,
        heads: int,
        ranges: ops.KeyRanges,
        keep_flags: Optional[DropoutMaskFn],
        factor: float,
        save_flags: bool,
    ) -> torch.Tensor:
        flags = keep_flags() if keep_flags is not None else None
        work = _Workspace(packed, heads, ranges, flags is not None)
        y = packed.new_empty(*packed.shape[:3], heads, packed.shape[4])
        for group in work.groups():
            q, k, v = work.queries_keys_values(packed, group)
            out = torch.empty_like(q)
            for tile in work.tiles(group):
                if tile.is_empty:
                    out[:, tile.rows].zero_()
                    continue
                p = work.probabilities(q, k, group, tile)
                if flags is not None:
                    p.mul_(work.flags(flags, group, tile))
                out[:, tile.rows].copy_(work.rows(p, v[:, tile.keys]))
            if flags is not None:
                out.mul_(factor)
            work.store(out, y, group)
        ctx.save_for_backward(packed, *([flags] if flags is not None and save_flags else []))
        ctx.heads, ctx.ranges, ctx.keep_flags, ctx.factor = heads, ranges, keep_flags, factor
        return y

    @staticmethod
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        packed, *saved = ctx.saved_tensors
        flags = saved[0] if saved else ctx.keep_flags() if ctx.keep_flags is not None else None
        grad = torch.empty_like(packed, memory_format=torch.contiguous_format)
        work = _Workspace(packed, ctx.heads, ctx.ranges, flags is not None)
        for group in work.groups():
            inputs = work.queries_keys_values(packed, group)
            out_grad = work.copy_of(y_grad, group)
            if flags is not None:
                out_grad.mul_(ctx.factor)
            grads = _group_gradients(work, group, inputs, out_grad, flags)
            for x, part in zip(grads, work.split(grad)):
                work.store(x, part, group)
        return grad, None, None, None, None, None


def _group_gradients(
    work: "_Workspace", group: "Group", inputs: "Inputs", out_grad: torch.Tensor, flags: Optional[torch.Tensor]
) -> "Inputs":
    """Return the gradients of a group's queries, keys and values; see :meth:`_Workspace.queries_keys_values`."""
    q, k, v = inputs
    q_grad, k_grad, v_grad = (torch.empty_like(x) for x in inputs)
    tiles = work.tiles(group)
    # the first tile mostly reaches all keys, and sets the sums to which the next ones add
    is_set = False
    if tiles[0].keys != slice(0, work.length):
        is_set = True
        k_grad.zero_()
        v_grad.zero_()
    for tile in tiles:
        if tile.is_empty:
            q_grad[:, tile.rows].zero_()
            continue
        p = work.probabilities(q, k, group, tile)
        queries, above = q[:, tile.rows], out_grad[:, tile.rows]
        p_grad = torch.bmm(above, v[:, tile.keys].transpose(1, 2), out=work.scores(p.shape, 1))
        if flags is None:
            dropped = p
        else:
            mask = work.flags(flags, group, tile)
            p_grad.mul_(mask)
            dropped = mask.mul_(p)
        work.add_product(v_grad[:, tile.keys], dropped.transpose(1, 2), above, is_set)
        scores_grad = ops.softmax_gradient_(p_grad, p)
        work.add_product(k_grad[:, tile.keys], scores_grad.transpose(1, 2), queries, is_set)
        is_set = True
        q_grad[:, tile.rows].copy_(work.rows(scores_grad, k[:, tile.keys]))
    return q_grad.mul_(work.scale), k_grad, v_grad


Group = Tuple[slice, slice]  # samples, heads of keys
Inputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values


class _Tile(NamedTuple):
    """A tile of queries, and the keys that hold all that any of them sees.

    Attributes:
        low, high: the queries from ``low`` to before ``high``.
        rows: of the products, one for each of these queries and head that shares a head of keys.
        keys: from the first key that any query sees; empty if none sees any.
        masks: (keys of the tile, mask [samples or 1, 1, queries, 1, keys]) where some queries do not see a key: 0 for
            the keys that a query sees, else -inf.
        sees_none: bool [samples or 1, 1, queries, 1, 1], which queries see no key; None if there are none.
    """

    low: int
    high: int
    rows: slice
    keys: slice
    masks: Tuple[Tuple[slice, torch.Tensor], ...]
    sees_none: Optional[torch.Tensor]

    @property
    def is_empty(self) -> bool:
        """Whether no query of the tile sees any key."""
        return bool(self.keys.start >= self.keys.stop)


class _Workspace:
    """Memory for a group of heads, and the order of the work. All of it is float32 if an operation lacks a good kernel
    for a 16-bit type."""

    def __init__(self, packed: torch.Tensor, heads: int, ranges: ops.KeyRanges, drops: bool) -> None:
        self._shards, self.samples, self._tokens, slots, self._width = packed.shape
        self.length, self.kv_heads = ranges.queries, (slots - heads) // 2
        self._sharing = heads // self.kv_heads
        self.scale = 1.0 / math.sqrt(self._width)
        self._like = packed.new_empty(0, dtype=ops.attention_dtype(packed.dtype))
        narrow = self._like.element_size() == 2
        threads = torch.get_num_threads()
        tiling = attention_tiling(self.length, self.samples, self.kv_heads, narrow, threads, self._sharing)
        self._query_tile, self._samples_at_once, self._heads_at_once = tiling.queries, tiling.samples, tiling.heads
        self._ranges = ranges
        self._tiles_of_samples: Dict[int, Tuple[_Tile, ...]] = {}
        rows = tiling.products * self._query_tile * self._sharing
        self._rows = self._like.new_empty(rows * self._width)
        sums = tiling.products * self.length * self._width
        adds_first = any(self.tiles(group)[0].keys != slice(0, self.length) for group in self.groups())
        has_sums = needs_separate_accumulator(tiling, self.length) or (adds_first and not narrow)
        self._sums = self._like.new_empty(sums if has_sums else 0)
        self._scores = self._like.new_empty(3 if drops else 2, rows * self.length)

    def groups(self) -> Iterator[Group]:
        """Iterate over the groups of samples and heads whose products are computed as one batch."""
        for sample in range(0, self.samples, self._samples_at_once):
            samples = slice(sample, min(sample + self._samples_at_once, self.samples))
            for head in range(0, self.kv_heads, self._heads_at_once):
                yield samples, slice(head, min(head + self._heads_at_once, self.kv_heads))

    def tiles(self, group: Group) -> Tuple[_Tile, ...]:
        """Return a group's tiles, from the last queries to the first."""
        if self._ranges.first.shape[0] == 1:
            return _shared_tiles(self._ranges, self._query_tile, self._sharing, self._like.dtype)
        samples = group[0]
        if samples.start not in self._tiles_of_samples:
            first, end = (x[samples].numpy() for x in (self._ranges.first, self._ranges.end))
            self._tiles_of_samples[samples.start] = _tiles(
                first, end, self._query_tile, self._sharing, self._like.dtype
            )
        return self._tiles_of_samples[samples.start]

    def split(self, packed: torch.Tensor) -> Inputs:
        """Return the views of queries, keys and values."""
        q, k, v = packed.split((self.kv_heads * self._sharing, self.kv_heads, self.kv_heads), 3)
        return q, k, v

    def queries_keys_values(self, packed: torch.Tensor, group: Group) -> Inputs:
        """Return the scaled queries [products, s * sharing, d], the keys and the values [products, s, d] of a group:
        the queries of a position that share a key lie beside each other."""
        q, k, v = (self.copy_of(part, group) for part in self.split(packed))
        return q.mul_(self.scale), k, v

    def copy_of(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Copy a group of [shards, b, s / shards, kv heads * n, d] to [products, s * n, d]."""
        samples, heads = _sizes(group)
        copy = self._like.new_empty(samples * heads, self.length * (x.shape[3] // self.kv_heads), self._width)
        self._grouped_view(copy, group).copy_(self._of_group(x, group))
        return copy

    def store(self, x: torch.Tensor, out: torch.Tensor, group: Group) -> None:
        """Copy [products, s * n, d] back to a group of ``out``, [shards, b, s / shards, kv heads * n, d]."""
        self._of_group(out, group).copy_(self._grouped_view(x, group))

    def _grouped_view(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view(*_sizes(group), self._shards, self._tokens, -1, self._width)

    def _of_group(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the view of a group: [shards, b, s / shards, kv heads * n, d] → [samples, kv heads of the group,
        shards, s / shards, n, d]."""
        by_key = x.view(*x.shape[:3], self.kv_heads, -1, self._width)
        return by_key[:, group[0], :, group[1]].permute(1, 3, 0, 2, 4, 5)

    def scores(self, shape: Tuple[int, ...], index: int) -> torch.Tensor:
        """Return the ``index``-th buffer for scores in this shape, such as [products, rows, keys]; buffers are
        reused."""
        return self._scores[index, : math.prod(shape)].view(shape)

    def rows(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the product x y [products, rows, d] in contiguous memory, because kernels for 16-bit types are slow to
        write with gaps."""
        shape = (*x.shape[:2], self._width)
        return torch.bmm(x, y, out=self._rows[: math.prod(shape)].view(shape))

    def add_product(self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, adds: bool) -> None:
        """Add the product x y to ``out`` [products, keys, d], or set it, which must then be that of all keys.

        PyTorch's ``baddbmm`` takes the heads one by one if ``out`` has gaps, and shares each among the threads. It is
        used for 16-bit types only, where it alone adds before it rounds.
        """
        if not adds:
            torch.bmm(x, y, out=out)
        elif out.element_size() == 2:
            out.baddbmm_(x, y)
        else:
            out.add_(torch.bmm(x, y, out=self._sums[: out.numel()].view(out.shape)))

    def probabilities(self, q: torch.Tensor, k: torch.Tensor, group: Group, tile: _Tile) -> torch.Tensor:
        """Return the probabilities of a tile, [products, rows, keys]; 0 for queries that see no key."""
        rows, keys = q[:, tile.rows], k[:, tile.keys].transpose(1, 2)
        scores = torch.bmm(rows, keys, out=self.scores((*rows.shape[:2], keys.shape[2]), 0))
        by_query = scores.view(*_sizes(group), tile.high - tile.low, self._sharing, -1)
        for part, mask in tile.masks:
            by_query[..., part].add_(mask)
        p = ops.softmax_(scores)
        if tile.sees_none is not None:
            p.view(by_query.shape).masked_fill_(tile.sees_none, 0.0)
        return p

    def flags(self, flags: torch.Tensor, group: Group, tile: _Tile) -> torch.Tensor:
        """Return a tile's dropout flags as numbers."""
        by_key = flags.view(self.samples, self.kv_heads, self._sharing, self.length, self.length)
        of_tile = by_key[group[0], group[1], :, tile.low : tile.high, tile.keys].transpose(2, 3)
        numbers = self.scores(tuple(of_tile.shape), 2).copy_(of_tile)
        return numbers.view(-1, tile.rows.stop - tile.rows.start, of_tile.shape[4])


def _tiles(first: np.ndarray, end: np.ndarray, queries: int, sharing: int, dtype: torch.dtype) -> Tuple[_Tile, ...]:
    """Return the tiles of samples whose queries see keys [first, end), from the last queries to the first.

    Args:
        first, end: [samples or 1, s].
        queries: queries of a tile.
        sharing: heads of queries that share a head of keys.
        dtype: type of the scores.
    """
    tiles: List[_Tile] = []
    made: Dict[Tuple[bytes, bytes, int], torch.Tensor] = {}
    for low in reversed(range(0, first.shape[1], queries)):
        high = min(low + queries, first.shape[1])
        of_tile = first[:, low:high], end[:, low:high]
        # keys that any query sees, and those that all queries see
        any_from, any_to = int(of_tile[0][:, 0].min()), int(of_tile[1][:, -1].max())
        all_from, all_to = min(int(of_tile[0][:, -1].max()), any_to), max(int(of_tile[1][:, 0].min()), any_from)
        masks = []
        for begin, stop in ((any_from, all_from), (max(all_from, all_to), any_to)):
            if begin < stop:
                seen = [np.clip(x - begin, 0, stop - begin) for x in of_tile]
                key = (seen[0].tobytes(), seen[1].tobytes(), stop - begin)
                if key not in made:  # causal tiles have the same
                    made[key] = _mask(seen[0], seen[1], stop - begin, dtype)
                masks.append((slice(begin - any_from, stop - any_from), made[key]))
        is_empty = of_tile[0] == of_tile[1]
        sees_none = torch.from_numpy(is_empty)[:, None, :, None, None] if is_empty.any() else None
        rows = slice(low * sharing, high * sharing)
        tiles.append(_Tile(low, high, rows, slice(any_from, any_to), tuple(masks), sees_none))
    return tuple(tiles)


def _mask(first: np.ndarray, end: np.ndarray, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [samples, 1, queries, 1, width] of keys [first, end) for each query, 0, else -inf."""
    positions = np.arange(width, dtype=np.int32)
    is_seen = (positions >= first[..., np.newaxis]) & (positions < end[..., np.newaxis])
    mask = np.where(is_seen, np.float32(0.0), np.float32(-math.inf))
    return torch.from_numpy(mask).to(dtype).unsqueeze(1).unsqueeze(3)


@functools.lru_cache(maxsize=8)
def _shared_tiles(ranges: ops.KeyRanges, queries: int, sharing: int, dtype: torch.dtype) -> Tuple[_Tile, ...]:
    """Return the tiles of ranges that all samples share, such as the causal ones; see :func:`_tiles`."""
    return _tiles(ranges.first.numpy(), ranges.end.numpy(), queries, sharing, dtype)


def _sizes(group: Group) -> Tuple[int, int]:
    """Return the numbers of samples and of heads; their product is the number of products in a batch."""
    samples, heads = group
    return samples.stop - samples.start, heads.stop - heads.start
