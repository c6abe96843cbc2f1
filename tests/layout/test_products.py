"""How much of a product in 16 bits is cast at one time."""

from __future__ import annotations

import pytest

from fugaku_gpt.layout.products import cast_elements, cast_rows


def test_as_many_rows_as_make_six_million_elements_but_not_too_few() -> None:
    assert [cast_rows(columns) for columns in (768, 5120, 20480, 1)] == [8192, 1228, 512, 6 * 2**20]
    assert cast_rows(0) == 6 * 2**20


@pytest.mark.parametrize("rows, columns", [(50304, 768), (3072, 768), (5120, 20480), (20000, 5120), (3, 0)])
def test_elements_are_those_of_the_rows_but_for_part_of_one(rows: int, columns: int) -> None:
    most = min(rows, cast_rows(columns)) * columns
    assert most <= cast_elements(rows, columns) <= most + columns
