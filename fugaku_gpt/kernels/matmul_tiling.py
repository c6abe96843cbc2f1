"""Sizes for matrix products: rows of a 16-bit product that are added to a float32 sum at a time, the smallest products
for the native GEMM, and its workspace."""

from __future__ import annotations

_CAST_ELEMENTS = 6 * 2**20  # 8192 rows of 768
_MIN_CAST_ROWS = 512  # fewer make slow products; not measured of matrices wider than 768


def cast_rows(columns: int) -> int:
    """Rows at a time: a product is in memory of its own before it is added, and PyTorch's addition casts it first
    (seen: 230 MiB for all logits of 124M)."""
    return max(_MIN_CAST_ROWS, _CAST_ELEMENTS // max(1, columns))


def cast_elements(rows: int, columns: int) -> int:
    """The most elements of a product [rows, columns] at a time; never more for a smaller product."""
    return min(rows * columns, max(_CAST_ELEMENTS, _MIN_CAST_ROWS * columns))


# the native GEMM is no slower than a library's from these sizes on: each of m, n and k, and m * n * k
MIN_DIMENSION, MIN_MULTIPLY_ADDS = 64, 2**24
# as in gemm_sizes.h for AVX-512: panels [KC, MR] and [KC, NR] with the distance between them, MR 8, NR 48, KC 768;
# shorter vectors and A64FX need no more
_A_PANEL, _B_PANEL = 8 * 768 + 16, 48 * 768 + 16
_MC_PANELS, _ACC_ROWS, _NC_PANELS, _PRIVATE_PANELS = 16, 1024, 64, 16


def gemm_workspace_bytes(columns: int, deferred_columns: int, threads: int) -> int:
    """The most bytes of workspace that the native GEMM keeps on any processor; exactly those with AVX-512. A64FX needs
    a fifth of them: 6.3 MB with 12 threads.

    Args:
        columns: columns of the widest result.
        deferred_columns: columns of the widest result that is rounded to 16 bits only after
            several blocks of the inner dimension; 0 without any.
    """

    def packed_panels(columns: int) -> int:
        return max(min(-(-columns // 48), _NC_PANELS), threads * _PRIVATE_PANELS)

    sums = 48 * packed_panels(deferred_columns) * _ACC_ROWS if deferred_columns else 0
    return 4 * (threads * _MC_PANELS * _A_PANEL + packed_panels(columns) * _B_PANEL + sums + 16)
