"""Tests of the kernels for few new tokens: products of a weight and few vectors, and attention over a cache."""

from __future__ import annotations

import math
from typing import Callable, List

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.kernels import library_file
from fugaku_gpt.ops import native
from tests.ops.inputs import numbers

pytestmark = [
    pytest.mark.skipif(not library_file().exists(), reason="no compiled kernels: fugaku-gpt env kernels"),
    pytest.mark.usefixtures("threads"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares with results in float64, up to roundings of the largest number."""
    assert actual.shape == expected.shape
    largest = max(1.0, float(expected.abs().max()))
    assert float((actual.double() - expected).abs().max()) <= TOLERANCES[actual.dtype] * largest


@DTYPES
@settings(max_examples=60)
@given(
    rows=st.integers(1, 12),
    outputs=st.one_of(st.integers(1, 40), st.just(700)),
    inputs=st.one_of(st.integers(1, 140), st.just(576)),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_few_rows_are_those_in_float64_rounded(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_bias: bool, seed: int
) -> None:
    x, weight = numbers(rows, inputs, seed=seed).to(dtype), numbers(outputs, inputs, seed=seed + 1).to(dtype)
    bias = numbers(outputs, seed=seed + 2).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    y = native.gemv(x, weight, bias)
    assert y.dtype == dtype
    check_close(y, expected)


@DTYPES
def test_a_row_of_a_product_depends_neither_on_other_rows_nor_on_threads(dtype: torch.dtype, threads: int) -> None:
    x, weight, bias = (numbers(*shape).to(dtype) for shape in ((8, 203), (301, 203), (301,)))
    together = native.gemv(x, weight, bias)
    assert all(torch.equal(together[i : i + n], native.gemv(x[i : i + n], weight, bias)) for i, n in ((0, 1), (3, 5)))
    torch.set_num_threads(threads + 1)
    assert torch.equal(together, native.gemv(x, weight, bias))


@DTYPES
def test_a_vector_with_nan_leaves_the_products_of_other_vectors(dtype: torch.dtype) -> None:
    x, weight = numbers(5, 70).to(dtype), numbers(9, 70).to(dtype)
    expected = native.gemv(x, weight, None)
    x[2, 69] = math.nan
    y = native.gemv(x, weight, None)
    assert bool(torch.isnan(y[2]).all())
    assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_only_few_rows_without_gradients_are_multiplied_by_the_kernel() -> None:
    x, weight = numbers(2, 3, 40).float(), numbers(30, 40).float()
    assert not native.has_native_gemv(x, weight)  # autograd would not see it
    with torch.no_grad():
        assert native.has_native_gemv(x, weight) and native.has_native_gemv(x.bfloat16(), weight.bfloat16())
        assert native.has_native_gemv(x.transpose(0, 1), weight)
        many = torch.zeros(native.MAX_GEMV_ROWS + 1, 40)
        for rows, matrix in ((many, weight), (x, weight.bfloat16()), (x.double(), weight.double()), (x[:0], weight)):
            assert not native.has_native_gemv(rows, matrix)
        assert not native.has_native_gemv(x, numbers(40, 30).float().t())
        for rows, matrix in ((x, weight), (x.transpose(0, 1), weight), (many, weight), (x.half(), weight.half())):
            y = ops.linear_of_few_rows(rows, matrix)
            expected = rows.double() @ matrix.double().t()
            assert y.dtype == rows.dtype and float((y.double() - expected).abs().max()) <= 0.02


def attention_of(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Attention over a cache by its definition, in float64."""
    sharing = q.shape[2] // keys.shape[1]
    k, v = (x.double().repeat_interleave(sharing, dim=1) for x in (keys, values))  # [b, heads, capacity, d]
    scores = q.double().transpose(1, 2) @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    is_later = torch.arange(keys.shape[2]) > positions[:, None, :, None]
    return (torch.softmax(scores.masked_fill(is_later, -math.inf), -1) @ v).transpose(1, 2)


@DTYPES
@settings(max_examples=60)
@given(
    samples=st.integers(1, 3),
    tokens=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    sharing=st.integers(1, 4),
    width=st.sampled_from([1, 5, 8, 16, 33, 64, 80]),
    spread=st.sampled_from([0.01, 1.0, 20.0]),
    seed=st.integers(0, 99),
)
def test_attention_over_a_cache_is_that_in_float64_rounded(
    dtype: torch.dtype, samples: int, tokens: int, kv_heads: int, sharing: int, width: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    capacity = int(torch.randint(tokens, 700, (1,), generator=generator))
    lengths = torch.randint(0, capacity - tokens + 1, (samples, 1), generator=generator)
    positions, heads = lengths + torch.arange(tokens), kv_heads * sharing
    q = numbers(samples, tokens, heads + 2, width, seed=seed, spread=spread).to(dtype)[:, :, 1:-1]
    keys, values = (numbers(samples, kv_heads, capacity, width, seed=seed + n).to(dtype) for n in (1, 2))
    expected = attention_of(q, keys, values, positions)
    for sample, length in enumerate(lengths[:, 0].tolist()):  # nothing is read behind a text
        keys[sample, :, length + tokens :] = values[sample, :, length + tokens :] = math.nan
    assert native.has_native_decode_attention(q, keys)
    check_close(native.decode_attention(q, keys, values, positions, int(positions.max()) + 1), expected)


@DTYPES
def test_attention_over_a_cache_depends_neither_on_other_texts_nor_on_threads(dtype: torch.dtype, threads: int) -> None:
    q, positions = numbers(2, 1, 6, 64).to(dtype), torch.tensor([[290], [600]])
    keys, values = (numbers(2, 2, 640, 64, seed=seed).to(dtype) for seed in (1, 2))
    together = native.decode_attention(q, keys, values, positions, 601)
    assert torch.equal(together[:1], native.decode_attention(q[:1], keys[:1], values[:1], positions[:1], 291))
    torch.set_num_threads(threads + 1)
    assert torch.equal(together, native.decode_attention(q, keys, values, positions, 601))


def test_queries_that_the_kernel_cannot_step_through_and_other_types_are_left_to_pytorch() -> None:
    keys, q = torch.zeros(2, 2, 10, 8), torch.zeros(2, 3, 4, 8)
    assert native.has_native_decode_attention(q, keys)
    for queries, cache in (
        (q.transpose(1, 2), keys),
        (torch.zeros(3, 2, 4, 8).transpose(0, 1), keys),
        (torch.zeros(2, 3, 4, 16)[..., ::2], keys),
        (q.bfloat16(), keys),
        (q.double(), keys.double()),
        (torch.zeros(2, 9, 4, 8), keys),
        (q, torch.zeros(2, 2, 20, 8)[:, :, :10]),
    ):
        assert not native.has_native_decode_attention(queries, cache)


HEADS = [(2, 3, 5, 6, 8), (2, 3, 5, 2, 8), (2, 3, 5, 2, 8)]


@DTYPES
@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "PyTorch"])
def test_operators_give_the_same_bits_without_gradients(
    dtype: torch.dtype, use_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", use_kernels)
    x, weight, bias = numbers(2, 9, 40).to(dtype), numbers(40).float(), numbers(40, seed=1).float()
    q, k, v = (numbers(*shape, seed=seed).to(dtype) for seed, shape in enumerate(HEADS))
    angles = [numbers(2, 1, 5, 1, 4, seed=seed).float() for seed in (1, 2)]
    functions: List[Callable[[], torch.Tensor]] = [
        lambda: ops.rms_norm(x, weight, 1e-5),
        lambda: ops.layer_norm(x, weight, bias, 1e-5),
        lambda: ops.swiglu(x),
        lambda: ops.gelu(x),
        lambda: ops.gelu_tanh(x),
        lambda: ops.pack_heads(q, k, v, (angles[0], angles[1])),
    ]
    for function in functions:
        with torch.no_grad():
            without = function()
        assert torch.equal(without, function())
