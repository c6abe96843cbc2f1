"""Tests that products by our own kernels are their definition, rounded, for any shapes and strides."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS
from fugaku_gpt.kernels.library import BFLOAT16
from fugaku_gpt.ops import native
from tests.support.product_verdicts import product_verdict, use_verdict_file

pytestmark = pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here")

SIZES = [1, 2, 3, 7, 8, 9, 16, 47, 48, 49, 97, 130]
DTYPES = [torch.float32, torch.bfloat16]


def has_product_kernel(dtype: torch.dtype) -> bool:
    return native._library().supports_gemm(native._NATIVE_TYPES[dtype])


@pytest.fixture
def requested_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """Computes products of all sizes by the kernels; yields the shapes that they were asked for."""
    shapes: List[Any] = []
    multiply = native.matmul_

    def recording_matmul(into: torch.Tensor, x: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
        shapes.append((*into.shape, x.shape[1]))
        return multiply(into, x, *operands, **options)

    monkeypatch.setattr(native, "matmul_", recording_matmul)
    monkeypatch.setattr(native, "MIN_DIMENSION", 4)
    monkeypatch.setattr(native, "MIN_MULTIPLY_ADDS", 1)
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", True)
    monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", dict.fromkeys(DTYPES, True))
    yield shapes


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def is_close(actual: torch.Tensor, expected: torch.Tensor, inner: int) -> bool:
    """Whether a result is right up to roundings of float32 sums of ``inner`` products."""
    return float((actual.double() - expected).abs().max()) <= 2.0**-22 * inner * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=150)
@given(
    rows=st.sampled_from([*SIZES, 300, 1030]), inner=st.sampled_from([*SIZES, 769, 1540]),
    columns=st.sampled_from([*SIZES, 3100]), turned=st.tuples(st.booleans(), st.booleans()),
    gap=st.integers(0, 3), shift=st.integers(0, 1),
    adds=st.booleans(), rounds=st.booleans(), biased=st.booleans(), threads=st.integers(1, 3), seed=st.integers(0, 9),
)  # fmt: skip
def test_a_product_is_right_for_any_number_of_threads(
    dtype: torch.dtype,
    rows: int,
    inner: int,
    columns: int,
    turned: Any,
    gap: int,
    shift: int,
    adds: bool,
    rounds: bool,
    biased: bool,
    threads: int,
    seed: int,
) -> None:
    if not has_product_kernel(dtype):
        pytest.skip("this processor does not multiply pairs of them")
    rounds, adds = rounds and dtype == torch.bfloat16, adds and not rounds
    if rows * columns > 2**18:
        columns = 48

    def side(count: int, across: int, is_turned: bool, seed: int) -> torch.Tensor:
        """A matrix whose rows (transposed: columns) have gaps between them; the first is not always aligned."""
        if is_turned:
            return side(across, count, False, seed).t()
        memory = numbers(count * (across + gap) + shift, seed=seed).to(dtype)
        return memory[shift:].view(count, across + gap)[:, :across]

    x, y = side(rows, inner, turned[0], seed), side(inner, columns, turned[1], seed + 1)
    bias = numbers(columns, seed=seed + 2) if biased else None
    memory = numbers(rows + 1, columns + gap, seed=seed + 3).to(dtype if rounds else torch.float32)
    before, into = memory.clone(), memory[:-1, :columns]
    expected = x.double() @ y.double() + (0.0 if bias is None else bias.double())
    if adds:
        expected += into.double()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = native.matmul_(into, x, y, bias, accumulate=adds)
        again = before.clone()
        torch.set_num_threads(1)
        native.matmul_(again[:-1, :columns], x, y, bias, accumulate=adds)
    finally:
        torch.set_num_threads(threads_before)
    assert result is into
    if rounds:
        assert bool(((into.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-20 * inner).all())
    else:
        assert is_close(into, expected, inner)
    assert torch.equal(memory, again)  # the same by one thread
    assert torch.equal(memory[-1], before[-1]) and torch.equal(memory[:, columns:], before[:, columns:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_propagate_and_nothing_past_the_end_is_read(dtype: torch.dtype) -> None:
    if not has_product_kernel(dtype):
        pytest.skip("this processor does not multiply pairs of them")
    memory_x, memory_y = torch.full((9, 12), float("nan")).to(dtype), torch.full((12, 9), float("nan")).to(dtype)
    x, y = memory_x[:7, :5], memory_y[:5, :7]  # an odd number in the middle: a pair has one
    x.fill_(1.0)
    y.fill_(2.0)
    assert torch.equal(native.matmul_(torch.empty(7, 7), x, y), torch.full((7, 7), 10.0))
    turned = native.matmul_(torch.empty(7, 7), memory_y.t()[:7, :5], memory_x.t()[:5, :7])
    assert torch.equal(turned, torch.full((7, 7), 10.0))
    x[3, 2] = float("inf")
    y[2, 4] = 0.0
    product = native.matmul_(torch.empty(7, 7), x, y)
    assert bool(product[3, 4].isnan()) and int(product.isnan().sum()) == 1 and int(product.isinf().sum()) == 6


def test_float32_layers_are_computed_by_the_kernels(requested_shapes: List[Any]) -> None:
    x, weight, bias = numbers(3, 20, 40), numbers(24, 40, seed=1), numbers(24, seed=2)
    inner, sums, into = weight.t().contiguous(), torch.ones(24, 40), torch.empty(60, 24)
    rows = x.view(-1, 40)
    with torch.no_grad():
        grad = ops.linear(x, weight)
        products = (
            ops.linear(x, weight, bias),
            grad,
            ops.matmul(x, inner),
            ops.matmul(x, weight.t()),
            ops.linear_into(into, rows, weight).view(3, 20, 24),
            ops.matmul_into(torch.empty(60, 24), rows, inner).view(3, 20, 24),
        )
        ops.add_product(sums, grad.view(-1, 24).t(), rows)
    assert requested_shapes == [(60, 24, 40)] * 6 + [(24, 40, 60)]
    plain = x.double() @ inner.double()
    for y, expected in zip(products, (plain + bias.double(), *[plain] * 5)):
        assert y.is_contiguous() and y.shape == expected.shape and is_close(y, expected, 40)
    assert all(y._base is None for y in products[:4])  # no views: in-place work on them may be refused
    assert is_close(sums, 1.0 + plain.view(-1, 24).t() @ rows.double(), 60)
    turned = x.transpose(0, 1)
    with torch.no_grad():
        assert torch.equal(ops.linear(turned, weight, bias), products[0].transpose(0, 1)) and len(requested_shapes) == 8
        assert is_close(ops.linear(x, weight, bias[:1]), plain + bias[:1].double(), 40) and len(requested_shapes) == 8
        assert ops.linear(x[:, :0], weight).shape == (3, 0, 24) and len(requested_shapes) == 8


def test_bfloat16_layers_are_rounded_and_sums_of_gradients_are_not(
    requested_shapes: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_product_kernel(torch.bfloat16):
        pytest.skip("this processor does not multiply pairs of them")
    x, y, sums = numbers(20, 30).bfloat16(), numbers(20, 24, seed=1).bfloat16(), torch.ones(30, 24)
    bias = numbers(20).bfloat16()
    monkeypatch.setitem(RANK_CONSENSUS.in_float32, torch.bfloat16, frozenset())
    with torch.no_grad():
        ops.add_product(sums, x.t(), y)
        products = ops.linear(x.t().contiguous(), y.t().contiguous()), ops.matmul(x.t(), y)
        biased = ops.linear(numbers(24, 30).bfloat16(), x, bias)
    assert requested_shapes == [(30, 24, 20)] * 3 + [(24, 20, 30)] and is_close(
        sums, 1.0 + x.double().t() @ y.double(), 20
    )
    expected_biased = numbers(24, 30).bfloat16().double() @ x.double().t() + bias.double()
    for actual, exact in (*((product, x.double().t() @ y.double()) for product in products), (biased, expected_biased)):
        assert actual.dtype == torch.bfloat16
        assert bool(((actual.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20).all())


def test_products_of_16_bits_that_are_computed_in_float32_use_the_kernels_too(
    requested_shapes: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, sums = numbers(20, 30).half(), numbers(20, 24, seed=1).half(), torch.ones(30, 24)
    monkeypatch.setitem(RANK_CONSENSUS.in_float32, torch.float16, frozenset(TRIALS))
    with torch.no_grad():
        ops.add_product(sums, x.t(), y)
        assert ops.matmul(x.t(), y).dtype == torch.float16
    assert len(requested_shapes) == 2 and is_close(sums, 1.0 + x.double().t() @ y.double(), 20)


def test_operands_that_do_not_suit_the_kernels_are_left_to_pytorch(
    requested_shapes: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = numbers(20, 30), numbers(30, 24)
    with torch.no_grad():
        assert native.has_native_matmul(x, y) and native.has_native_matmul(x, y, torch.empty(20, 24))
        unsuitable: Dict[str, Any] = {
            "of three dimensions": (x.view(2, 10, 30), y),
            "of other types": (x, y.double()),
            "of a type that they do not know": (x.double(), y.double()),
            "with gaps both ways": (numbers(40, 60)[::2, ::2], y),
            "small": (x[:3], y),
            "that do not belong together": (x[:, :29], y),
            "of a vector": (x, y[:, 0]),
            "of many matrices": (x, y.expand(30, 30, 24)),
            "into other 16 bits": (x, y, torch.empty(20, 24).bfloat16()),
            "into too few rows": (x, y, torch.empty(19, 24)),
            "into columns with gaps": (x, y, torch.empty(24, 20).t()),
        }
        assert [name for name, operands in unsuitable.items() if native.has_native_matmul(*operands)] == []
        rounded = x.bfloat16(), y.bfloat16(), torch.empty(20, 24).bfloat16()
        assert native.has_native_matmul(*rounded) is has_product_kernel(torch.bfloat16)
        assert not native.has_native_matmul(*rounded, accumulate=True)
        monkeypatch.setattr(native, "MIN_MULTIPLY_ADDS", 20 * 30 * 24 + 1)
        assert not native.has_native_matmul(x, y)
        monkeypatch.setattr(native, "MIN_MULTIPLY_ADDS", 1)
        monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", dict.fromkeys(DTYPES, False))
        assert not native.has_native_matmul(x, y) and not ops.uses_native_matmul(x.dtype)
        monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", dict.fromkeys(DTYPES, True))
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", False)
        assert not native.has_native_matmul(x, y) and not ops.uses_native_matmul(x.dtype)
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", True)
    assert not native.has_native_matmul(x, y)  # autograd watches
    with torch.no_grad():
        assert native.has_native_matmul(x, y)
    with torch.enable_grad():
        leaf = y.clone().requires_grad_()
        ops.matmul(x, leaf).sum().backward()
    assert leaf.grad is not None and not requested_shapes


def test_the_kernels_compute_products_where_they_were_measured_to_be_faster_unless_agreed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, threads = tmp_path / "products.json", torch.get_num_threads()
    for speedups, is_faster in (
        ({"compiled": 1.2}, True),
        ({"compiled": 1.02}, False),
        ({"compiled": 0.7}, False),
        ({"compiled": 1.2, "onednn": 1.18}, False),  # oneDNN would be used otherwise, and is as fast
        ({"compiled": 1.2, "onednn": 1.02}, True),
        ({"onednn": 1.2}, False),
    ):
        monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", {})
        use_verdict_file(monkeypatch, file, product_verdict("float32", threads, **speedups))
        assert ops.uses_native_matmul(torch.float32) is is_faster
        assert not ops.uses_native_matmul(torch.bfloat16)  # which has not been measured
        ops.choose_native_matmul(not is_faster, torch.float32)
        assert ops.uses_native_matmul(torch.float32) is not is_faster
    monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", {})
    for unsuitable in (product_verdict("float32", threads + 1, compiled=1.2), product_verdict("float32", threads, 2)):
        use_verdict_file(monkeypatch, file, unsuitable)
        assert not ops.uses_native_matmul(torch.float32)


def test_bfloat16_numbers_are_multiplied_where_the_processor_has_such_products() -> None:
    features = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    has_products = bool({"avx512_bf16", "bf16"} & features)  # as x86 and Arm call them
    assert native._library().supports_gemm(BFLOAT16) is has_products


@pytest.mark.usefixtures("requested_shapes")
@pytest.mark.parametrize("lacking", [False, True], ids=["this library", "a library without pairs"])
def test_products_that_the_library_lacks_are_left_to_pytorch_whatever_was_agreed(
    lacking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed on another kind of processor has the choice of its first start."""
    if lacking:
        monkeypatch.setattr(native, "_supports_gemm", lambda kind: kind != BFLOAT16)
    x, y = numbers(96, 80).bfloat16(), numbers(80, 112, seed=1).bfloat16()
    with torch.no_grad():
        exact = x.double() @ y.double()
        assert float((ops.matmul(x, y).double() - exact).abs().max()) <= 2.0**-8 * float(exact.abs().max())
        is_native = not lacking and has_product_kernel(torch.bfloat16)
        assert native.has_native_matmul(x, y) is ops.supports_native_matmul(torch.bfloat16) is is_native
        assert native.has_native_matmul(x.float(), y.float())


def test_a_forked_process_has_separate_working_memory() -> None:
    address = native._workspace_address(16)
    ctypes.memset(address, 1, 64)
    child = os.fork()
    if child == 0:
        ctypes.memset(address, 2, 64)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(address, 64) == b"\x01" * 64
