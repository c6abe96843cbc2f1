"""The documents that share the sequences of a batch: the keys that each token sees, and its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from fugaku_gpt import ops
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.parallel.sequence import UNSHARDED, Shard


@dataclass(frozen=True)
class Documents:
    """The documents of b sequences of s tokens. Between the cut layers a rank has r = s / shards tokens of each under
    sequence parallelism, otherwise r = s.

    Attributes:
        ranges: each token sees those of its document up to itself.
        positions: int64 [b, r], the place of each token in its document; None if positions are those in the sequence.
        rotation: cosines and sines of queries and keys [shards * b, 1, s / shards, 1, d / 2], shard after shard, if
            positions are rotary and begin anew with each document; else None.
    """

    ranges: ops.KeyRanges
    positions: Optional[torch.Tensor]
    rotation: Optional[ops.Rotation]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        begins: "np.ndarray[Any, np.dtype[np.bool_]]",
        resets_positions: bool,
        dtype: torch.dtype,
        shard: Shard = UNSHARDED,
    ) -> "Documents":
        """Return the documents of sequences; of a rank with a ``shard`` of each.

        Args:
            begins: [b, s], whether a document begins with a token. The first token of a sequence begins one in any
                case: what came before it in its document is in another sequence.
            resets_positions: whether positions begin at 0 with each document.
        """
        s = begins.shape[1]
        ranges = ops.KeyRanges.documents([[0, *np.flatnonzero(row).tolist()] for row in begins], s)
        if not resets_positions:
            return cls(ranges, None, None)
        positions = torch.arange(s) - ranges.first.long()
        rotation = None
        if model.positions == "rope":
            rotation = ops.rotation_at(model, shard.to_rank_order(positions), dtype)
        return cls(ranges, positions[:, shard.positions(s)], rotation)
