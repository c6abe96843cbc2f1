"""How much of a product in 16 bits is added to its sum in float32 at one time, and which products are for our compiled
kernels, with what memory."""

from __future__ import annotations

_CAST_ELEMENTS = 6 * 2**20  # 8192 rows of 768
_MIN_CAST_ROWS = 512  # fewer make slow products; not measured of matrices wider than 768


def cast_rows(columns: int) -> int:
    """Rows at one time: a product is in memory of its own before it is added, and PyTorch's own addition casts it there
    first (seen: 230 MiB for the logits of 124M, when all of them were)."""
    return max(_MIN_CAST_ROWS, _CAST_ELEMENTS // max(1, columns))


def cast_elements(rows: int, columns: int) -> int:
    """Elements of a product [rows, columns] at one time, at most; never more for a smaller product."""
    return min(rows * columns, max(_CAST_ELEMENTS, _MIN_CAST_ROWS * columns))


# from which on theirs is no slower than a library's: of each of a product's three dimensions, and of them multiplied
MIN_DIMENSION, MIN_MULTIPLY_ADDS = 64, 2**24
# of products.c, with the vectors that it is used with: panels [DEPTH, ROWS], [DEPTH, COLUMNS] and what is between them
_A_PANEL, _B_PANEL = 8 * 768 + 16, 48 * 768 + 16
_MC_PANELS, _ACC_ROWS, _NC_PANELS, _PRIVATE_PANELS = 16, 1024, 64, 16


def gemm_workspace_bytes(columns: int, deferred_columns: int, threads: int) -> int:
    """Memory that compiled products keep.

    Args:
        columns: of the widest.
        deferred_columns: columns of the widest whose sums are rounded to 16 bits only after some passes, 0 without any.
    """

    def packed_panels(columns: int) -> int:
        return max(min(-(-columns // 48), _NC_PANELS), threads * _PRIVATE_PANELS)

    sums = 48 * at_once(deferred_columns) * _ACC_ROWS if deferred_columns else 0
    return 4 * (threads * _MC_PANELS * _A_PANEL + at_once(columns) * _B_PANEL + sums + 16)
