"""The cells of a batch of grids as a sequence: row after row of each grid, then padding up to the longest.

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


@dataclass(frozen=True)
class Cells:
    """The cells of b grids, of which the largest have at most s.

    Attributes:
        rows, columns: int64 [b, s], where each cell is in its grid; 0 for padding.
        ranges: each cell sees all cells of its grid.
        is_cell: [b, 1, s], 1 for a cell and 0 for padding, in float32 at least.
        rotation: that of queries and keys, if positions are rotary.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    ranges: ops.KeyRanges
    is_cell: torch.Tensor
    rotation: Optional[ops.Rotation]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        heights: "np.ndarray[Any, np.dtype[np.int64]]",
        widths: "np.ndarray[Any, np.dtype[np.int64]]",
        cells: int,
        dtype: torch.dtype,
    ) -> "Cells":
        """Return the cells of grids of these heights and widths [b], padded to ``cells``."""
        counts, numbers = heights * widths, np.arange(cells)
        is_cell = numbers < counts[:, np.newaxis]
        rows, columns = (torch.from_numpy(np.where(is_cell, x, 0)) for x in np.divmod(numbers, widths[:, np.newaxis]))
        wide = dtype if dtype == torch.float64 else torch.float32
        return cls(
            rows,
            columns,
            ops.KeyRanges.bidirectional(counts.tolist(), cells),
            torch.from_numpy(is_cell).to(wide).unsqueeze(1),
            ops.rotation_in_grid(model, rows, columns, dtype) if model.positions == "rope" else None,
        )

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean [b, h] of [b, s, h] over the cells of each grid, computed in float32 at least."""
        wide = x.to(self.is_cell.dtype)
        return (torch.bmm(self.is_cell, wide).squeeze(1) / self.is_cell.sum(2)).to(x.dtype)
