"""Tests of the GEMM floor: every way of a product computes that product, and the products are those of a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Tuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gemm_floor import BLOCKS, ROWS, attention_product, linear_product, products_of  # noqa: E402

from fugaku_gpt.config import load_run_config  # noqa: E402
from fugaku_gpt.formulas.flops import exact_flops  # noqa: E402


def test_the_products_have_the_flops_of_the_formula() -> None:
    config = load_run_config(preset="124m", overrides=["training.micro_batch=4", "training.global_batch=4"])
    flops = sum(product.count * product.flops for product in products_of(config))
    assert flops == pytest.approx(exact_flops(config.model, 4, config.padded_vocab))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_way_of_a_linear_product_computes_that_product(dtype: torch.dtype) -> None:
    m, n, k = ROWS[0] + 7, 5, 3
    product = linear_product("some", 1, m, n, k)
    memory = torch.randn(product.inputs, dtype=dtype)
    memory[: m * k] = 2.0  # in any order: each element of the result is twice the sum of a column
    b = memory[m * k :]
    for name, way in product.ways.items():
        result = torch.zeros(product.outputs, dtype=dtype)
        with torch.no_grad():  # float32: layers use oneDNN where it is better
            returned = way(memory, result)()
        columns = b.view(n, k).sum(1) if name == "linear" or name[1] == "t" else b.view(k, n).sum(0)
        actual = result if returned is None else returned
        shape: Tuple[int, int] = (n, m) if "transposed" in name else (m, n)
        actual = actual.reshape(-1).view(shape)
        expected = 2.0 * (columns[:, None] if "transposed" in name else columns[None])
        torch.testing.assert_close(actual, expected.expand(shape))
    assert len(product.ways) == 1 + 2 + 4 * 3  # blocks of 512 rows are more than there are


@pytest.mark.parametrize("kind", ["scores", "values", "keys"])
def test_blocks_of_attention_leave_out_only_masked_scores(kind: str) -> None:
    heads, s, d = 2, BLOCKS[0] + 9, 4
    product = attention_product(kind, 1, heads, s, d)
    ones = torch.ones(product.inputs, dtype=torch.float64)
    sums = {}
    for name, way in product.ways.items():
        result = torch.zeros(product.outputs, dtype=torch.float64)
        way(ones, result)()
        sums[name] = float(result.sum())
    block = BLOCKS[0]
    computed = heads * (block * block + (s - block) * s if kind != "keys" else block * s + (s - block) ** 2)
    assert sums["batched"] == sums["one head at a time"] == product.flops / 2.0
    assert sums[f"blocks of {block}"] == computed * d
