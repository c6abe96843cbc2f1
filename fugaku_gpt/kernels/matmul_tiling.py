"""How much of a product in 16 bits is added to its sum in float32 at one time, and which products are for our compiled
kernels, with what memory."""

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


# from which on theirs is no slower than a library's: of each of a product's three dimensions, and of them multiplied
MIN_DIMENSION, MIN_MULTIPLY_ADDS = 64, 2**24
# of products.c, with the vectors that it is used with: panels [DEPTH, ROWS], [DEPTH, COLUMNS] and what is between them
_LEFT_PANEL, _RIGHT_PANEL = 8 * 768 + 16, 48 * 768 + 16
_GROUP, _BLOCK_ROWS, _BLOCK_PANELS, _OWN_PANELS = 16, 1024, 64, 16


def panel_bytes(columns: int, later: int, threads: int) -> int:
    """Memory that compiled products keep.

    Args:
        columns: of the widest.
        later: columns of the widest whose sums are rounded to 16 bits only after some passes, 0 without any.
    """

    def at_once(columns: int) -> int:
        return max(min(-(-columns // 48), _BLOCK_PANELS), threads * _OWN_PANELS)

    sums = 48 * at_once(later) * _BLOCK_ROWS if later else 0
    return 4 * (threads * _GROUP * _LEFT_PANEL + at_once(columns) * _RIGHT_PANEL + sums + 16)
