"""Tests of how many rows of a 16-bit product are cast at a time, and of the workspace of compiled products."""

from __future__ import annotations

import pytest
import torch  # noqa: F401  # whose OpenMP runtime the kernels need

from fugaku_gpt.kernels.library import BFLOAT16, FLOAT32
from fugaku_gpt.kernels.matmul_tiling import cast_elements, cast_rows, gemm_workspace_bytes
from tests.kernels.loaded import loaded_library


def test_as_many_rows_as_make_six_million_elements_but_not_too_few() -> None:
    assert [cast_rows(columns) for columns in (768, 5120, 20480, 1)] == [8192, 1228, 512, 6 * 2**20]
    assert cast_rows(0) == 6 * 2**20


@pytest.mark.parametrize("rows, columns", [(50304, 768), (3072, 768), (5120, 20480), (20000, 5120), (3, 0)])
def test_cast_elements_exceed_those_of_the_rows_by_a_row_at_most(rows: int, columns: int) -> None:
    row_elements = min(rows, cast_rows(columns)) * columns
    assert row_elements <= cast_elements(rows, columns) <= row_elements + columns


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(64, 64, 64), (2048, 3072, 768), (512, 768, 50304), (50304, 512, 768)]
)
@pytest.mark.parametrize("threads", [1, 2, 48])
def test_the_workspace_formula_covers_that_of_compiled_products(
    rows: int, inner: int, columns: int, dtype: int, threads: int
) -> None:
    library = loaded_library()
    later = columns if dtype == BFLOAT16 and inner > 2 * 768 else 0
    formula_bytes = gemm_workspace_bytes(columns, later, threads)
    library_bytes = 4 * library.gemm_workspace_floats(rows, columns, inner, dtype, dtype, threads)
    assert library_bytes <= formula_bytes
    if library.lanes() == 16 and (rows >= 1024 or not later):
        assert library_bytes == formula_bytes
