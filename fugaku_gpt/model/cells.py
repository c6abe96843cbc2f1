"""The cells of a batch of grids as a sequence: row after row of each grid, then padding up to the bucket's cells.

What depends on a grid's size is here, once for all layers: the keys that its cells see, their rows and columns, and
which of them are no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from fugaku_gpt import ops
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.parallel.sequence import UNSHARDED, Shard


@dataclass(frozen=True)
class Cells:
    """The cells of b grids, padded to s. Between the cut layers a rank has r = s / shards cells of each grid under
    sequence parallelism, otherwise r = s.

    Attributes:
        rows, columns: int64 [b, r], where each cell is in its grid; 0 for padding.
        ranges: each cell sees all cells of its grid.
        is_cell: [b, 1, r], 1 for a cell and 0 for padding, in float32 at least.
        counts: [b, 1], number of cells of each grid, in the same type.
        rotation: cosines and sines of queries and keys [shards * b, 1, s / shards, 1, d / 2], shard after shard, if
            positions are rotary.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    ranges: ops.KeyRanges
    is_cell: torch.Tensor
    counts: torch.Tensor
    rotation: Optional[ops.Rotation]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        heights: "np.ndarray[Any, np.dtype[np.int64]]",
        widths: "np.ndarray[Any, np.dtype[np.int64]]",
        cells: int,
        dtype: torch.dtype,
        shard: Shard = UNSHARDED,
    ) -> "Cells":
        """Return the cells of grids of these heights and widths [b], padded to ``cells``; of a rank with a ``shard`` of
        each."""
        counts, numbers = heights * widths, np.arange(cells)
        is_cell = numbers < counts[:, np.newaxis]
        rows, columns = (torch.from_numpy(np.where(is_cell, x, 0)) for x in np.divmod(numbers, widths[:, np.newaxis]))
        wide = dtype if dtype == torch.float64 else torch.float32
        rotation = None
        if model.positions == "rope":
            rotation = ops.rotation_in_grid(model, shard.to_rank_order(rows), shard.to_rank_order(columns), dtype)
        here = shard.positions(cells)
        return cls(
            rows[:, here],
            columns[:, here],
            ops.KeyRanges.bidirectional(counts.tolist(), cells),
            torch.from_numpy(is_cell[:, here]).to(wide).unsqueeze(1),
            torch.from_numpy(counts).to(wide).unsqueeze(1),
            rotation,
        )

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums [b, h] of [b, r, h] over the cells of each grid that are here, in float32 at least."""
        return torch.bmm(self.is_cell, x.to(self.is_cell.dtype)).squeeze(1)
