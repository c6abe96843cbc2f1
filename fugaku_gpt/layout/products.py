"""How much of a product in 16 bits is added to its sum in float32 at one time."""

from __future__ import annotations

_ELEMENTS = 6 * 2**20  # 8192 rows of 768
_FEWEST_ROWS = 512  # fewer make slow products; not measured of matrices wider than 768


def cast_rows(columns: int) -> int:
    """Rows at one time: a product is in memory of its own before it is added, and PyTorch's own addition casts it there
    first (seen: 230 MiB for the logits of 124M, when all of them were)."""
    return max(_FEWEST_ROWS, _ELEMENTS // max(1, columns))


def cast_elements(rows: int, columns: int) -> int:
    """Elements of a product [rows, columns] at one time, at most; never more for a smaller product."""
    return min(rows * columns, max(_ELEMENTS, _FEWEST_ROWS * columns))
