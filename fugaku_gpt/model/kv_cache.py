"""Keys and values of the tokens that a model has read, so that each further token costs one row of products.

A rank keeps those of its own layers and heads. Sequences have slots; each has its own length, so that sequences of
different lengths are continued in one batch. Slots in use are the first ones: a sequence that has ended gives its slot
to the last (:meth:`KeyValueCache.free_slot`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from fugaku_gpt import ops
from fugaku_gpt.config import ModelConfig


class NewTokens:
    """The tokens that a forward pass reads, as parts of longer sequences.

    Attributes:
        slots: the slots of the b sequences.
        positions: [b, t] int64, the position of each token in its sequence.
        is_prefill: nothing precedes these tokens, so that they attend to one another alone.
        end: one past the last position.
        last: [b] int64, which of its tokens is the last of each sequence, where padding follows some; otherwise None.
        needs_mask: not all of these tokens see the same number of keys.
    """

    def __init__(self, slots: slice, lengths: Sequence[int], tokens: int, counts: Sequence[int] = ()) -> None:
        """Place ``tokens`` tokens behind each sequence, whose ``lengths`` are those before. ``counts``: how many of its
        tokens are no padding; default: all."""
        self.slots = slots
        self.positions = torch.tensor(lengths).unsqueeze(1) + torch.arange(tokens)
        self.is_prefill = not any(lengths)
        self.end = max(lengths) + tokens
        self.needs_mask = min(lengths) + 1 < self.end
        self.last = torch.tensor(counts) - 1 if set(counts) - {tokens} else None
        self._rotation: Optional[ops.Rotation] = None

    def rotation(self, model: ModelConfig, dtype: torch.dtype) -> ops.Rotation:
        """Return the rotation of these positions, which all layers share."""
        if self._rotation is None:
            self._rotation = ops.rotation_at(model, self.positions, dtype)
        return self._rotation


@dataclass(frozen=True)
class CachedLayer:
    """One layer's part of the cache, [b, kv heads, capacity, d] each, and the tokens to be added to it."""

    keys: torch.Tensor
    values: torch.Tensor
    new: NewTokens

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store [b, t, kv heads, d] of the new tokens."""
        if not self.new.needs_mask:  # the same places in all sequences: no index for each
            start = self.new.end - keys.shape[1]
            self.keys[:, :, start : self.new.end].copy_(keys.transpose(1, 2))
            self.values[:, :, start : self.new.end].copy_(values.transpose(1, 2))
            return
        rows = torch.arange(self.keys.shape[0]).unsqueeze(1)  # [b, 1]: with [b, t] of positions, [b, t, kv heads, d]
        self.keys.transpose(1, 2)[rows, self.new.positions] = keys.to(self.keys.dtype)
        self.values.transpose(1, 2)[rows, self.new.positions] = values.to(self.values.dtype)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Attend from the new tokens to all up to themselves: q [b, t, heads, d] → [b, t, heads, d]."""
        (b, t, heads, d), kv_heads = q.shape, self.keys.shape[1]
        n = self.new.end
        wide = q.to(self.keys.dtype)
        if ops.has_native_decode_attention(wide, self.keys):
            return ops.decode_attention(wide, self.keys, self.values, self.new.positions, n).to(q.dtype)
        keys, values = (x[:, :, :n].flatten(0, 1) for x in (self.keys, self.values))  # [b * kv heads, n, d]
        # the query heads that share a key are rows of one product
        rows = wide.view(b, t, kv_heads, -1, d).permute(0, 2, 3, 1, 4).reshape(b * kv_heads, -1, d)
        scores = torch.bmm(rows * (1.0 / math.sqrt(d)), keys.transpose(1, 2))
        if self.new.needs_mask:
            is_later = torch.arange(n) > self.new.positions.view(b, 1, 1, t, 1)
            scores.view(b, kv_heads, -1, t, n).masked_fill_(is_later, -math.inf)
        y = torch.bmm(ops.softmax_(scores), values)
        return y.view(b, kv_heads, -1, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, heads, d).to(q.dtype)


class KeyValueCache:
    """Keys and values of a rank's layers.

    Attributes:
        lengths: number of tokens that each slot holds.
        capacity: most tokens of a sequence.
    """

    def __init__(
        self, layers: Iterable[int], model: ModelConfig, tp: int, slots: int, capacity: int, dtype: torch.dtype
    ) -> None:
        """Reserve memory for ``slots`` sequences of ``capacity`` tokens; ``tp`` ranks share the heads."""
        shape = (slots, model.local_kv_heads(tp), capacity, model.head_size)
        wide = ops.attention_dtype(dtype)  # as wide as attention computes, so that nothing is converted again
        self._layers: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {
            layer: (torch.zeros(shape, dtype=wide), torch.zeros(shape, dtype=wide)) for layer in layers
        }
        self.lengths: List[int] = [0] * slots
        self.capacity = capacity

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return sum(x.numel() * x.element_size() for pair in self._layers.values() for x in pair)

    def extend(self, first_slot: int, stop_slot: int, tokens: int, counts: Sequence[int] = ()) -> NewTokens:
        """Make room for ``tokens`` more of each sequence in some slots, and return their places. ``counts``: how many
        of its tokens are no padding, which later tokens replace; default: all."""
        slots = slice(first_slot, stop_slot)
        lengths = self.lengths[slots]
        self.lengths[slots] = [length + count for length, count in zip(lengths, counts or [tokens] * len(lengths))]
        return NewTokens(slots, lengths, tokens, counts)

    def layer(self, number: int, new: NewTokens) -> CachedLayer:
        """Return a layer's part of the slots of ``new``."""
        keys, values = self._layers[number]
        return CachedLayer(keys[new.slots], values[new.slots], new)

    def free_slot(self, ended: int, last: int) -> None:
        """Free the slot of a sequence that has ended; the sequence in the last slot in use moves there."""
        length = self.lengths[last]
        if ended != last:
            for pair in self._layers.values():
                for x in pair:
                    x[ended, :, :length].copy_(x[last, :, :length])
            self.lengths[ended] = length
        self.lengths[last] = 0
