"""Tests that products by oneDNN are those of PyTorch, rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch
import torch.nn.functional as F

from fugaku_gpt import compat, ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS
from fugaku_gpt.kernels import matmul_tiling as sizes
from fugaku_gpt.ops import gemm, tensor_pool
from tests.ops.inputs import random
from tests.ops.wrong import refuses
from tests.support.product_verdicts import product_verdict, use_verdict_file

OPERATORS = [gemm._onednn_with_plain_tensors, gemm._onednn_with_opaque_tensors]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=OPERATORS, ids=["plain tensors", "opaque tensors"])
def onednn(request: Any, monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """Computes float32 products by one of oneDNN's operators, if this build has it; returns the shapes requested."""
    operator = request.param
    if not gemm._is_correct(operator):
        pytest.skip("this PyTorch has no such operator of oneDNN's for float32 layers")
    requested_shapes: List[Any] = []
    by_onednn = gemm._onednn_matmul

    def recording_matmul(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        requested_shapes.append(tuple(x.shape))
        return by_onednn(x, *operands)

    monkeypatch.setattr(gemm, "_onednn", lambda: operator)
    monkeypatch.setattr(gemm, "_onednn_matmul", recording_matmul)
    monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", True)
    monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", {torch.float32: False})
    return requested_shapes


def is_rounded(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a result is that of float64 up to float32's roundings."""
    return float((actual - expected).abs().max()) <= 16 * EPS * float(expected.abs().max())


@pytest.mark.parametrize("shape", [(gemm._MIN_ONEDNN_ROWS,), (3, gemm._MIN_ONEDNN_ROWS), (257,)], ids=str)
@pytest.mark.parametrize("outputs", [24, 2 * gemm._ONEDNN_SPLIT + 5])
def test_products_by_onednn_are_those_of_pytorch_rounded(shape: Any, outputs: int, onednn: List[Any]) -> None:
    x, weight, bias = random(*shape, 40), random(outputs, 40), random(outputs)
    inner = weight.t().contiguous()
    with torch.no_grad():
        products = (
            ops.linear(x, weight, bias),
            ops.linear(x, weight),
            ops.linear(x, inner.t(), bias),
            ops.matmul(x, inner),
            ops.matmul(x, weight.t()),
        )
    assert len(onednn) == len(products)
    plain = x.double().matmul(inner.double())
    for y, expected in zip(products, (plain + bias, plain, plain + bias, plain, plain)):
        assert y.dtype == torch.float32 and y.shape == expected.shape and y.is_contiguous()
        assert is_rounded(y, expected)


@pytest.mark.parametrize("outputs", [24, gemm._ONEDNN_SPLIT, 2 * gemm._ONEDNN_SPLIT + 5])
def test_a_product_into_given_memory_is_that_of_pytorch_rounded(outputs: int, onednn: List[Any]) -> None:
    x, weight = random(gemm._MIN_ONEDNN_ROWS, 40), random(outputs, 40)
    memory = torch.full((len(x) + 1, outputs), 7.0)
    with torch.no_grad():
        product = ops.linear_into(memory[:-1], x, weight)
    assert len(onednn) == -(-outputs // gemm._ONEDNN_SPLIT)
    assert product.data_ptr() == memory.data_ptr() and bool((memory[-1] == 7.0).all())
    assert is_rounded(product, x.double() @ weight.double().t())


ROWS = gemm._MIN_ONEDNN_ROWS


@pytest.mark.parametrize("inner", [ROWS, gemm._ONEDNN_SPLIT, 2 * gemm._ONEDNN_SPLIT + 5])
def test_a_sum_of_products_is_onednn_s_if_the_build_has_no_better_kernel(inner: int, onednn: List[Any]) -> None:
    x, y = random(ROWS, inner + 3)[:, :inner], random(inner, ROWS + 1)  # rows with gaps, as padded logits have
    memory = torch.full((len(x) + 1, ROWS + 1), 7.0)
    sums = random(inner, ROWS + 1)
    added = sums.double() + x.t().double() @ memory[:-1].double()
    with torch.no_grad():
        ops.add_product(sums, x.t(), memory[:-1])
        product = ops.matmul_into(memory[:-1], x, y)
    own = gemm._onednn() is gemm._onednn_with_opaque_tensors
    operator_calls = -(-inner // (2 * gemm._ONEDNN_SPLIT)) - (
        -inner // gemm._ONEDNN_SPLIT
    )  # of rows, and of the inner dimension
    assert len(onednn) == (operator_calls if own else 0)
    assert is_rounded(sums, added)
    assert product.data_ptr() == memory.data_ptr() and bool((memory[-1] == 7.0).all())
    assert is_rounded(product, x.double() @ y.double())


@pytest.mark.parametrize(("rows", "inner", "columns"), [(ROWS - 1, ROWS, ROWS), (ROWS, 3, ROWS), (ROWS, ROWS, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_sums_of_products_are_pytorch_s(
    rows: int, inner: int, columns: int, dtype: torch.dtype, onednn: List[Any]
) -> None:
    are_pytorch_s(rows, inner, columns, dtype, no_gradients=True)
    assert not onednn


@pytest.mark.parametrize(("dtype", "no_gradients"), [(torch.float64, True), (torch.float32, False)])
def test_wide_sums_of_products_and_those_that_autograd_watches_are_pytorch_s(
    dtype: torch.dtype, no_gradients: bool, onednn: List[Any]
) -> None:
    are_pytorch_s(ROWS, ROWS, ROWS, dtype, no_gradients)
    assert not onednn


def are_pytorch_s(rows: int, inner: int, columns: int, dtype: torch.dtype, no_gradients: bool) -> None:
    x, y, sums = (random(*shape).to(dtype) for shape in ((rows, inner), (inner, columns), (rows, columns)))
    expected = torch.addmm(sums, x, y)
    with torch.set_grad_enabled(not no_gradients):
        ops.add_product(sums, x, y)
        assert torch.equal(ops.matmul_into(torch.empty(rows, columns, dtype=dtype), x, y), torch.mm(x, y))
    assert torch.equal(sums, expected)


def test_matrices_that_do_not_belong_together_are_refused(onednn: List[Any]) -> None:
    x, y = random(3 * gemm._ONEDNN_SPLIT, ROWS), random(ROWS, ROWS)
    with torch.no_grad(), pytest.raises(RuntimeError):
        ops.add_product(torch.zeros(2 * gemm._ONEDNN_SPLIT, ROWS), x, y)
    with torch.no_grad(), pytest.raises(RuntimeError):
        ops.linear_into(torch.empty(ROWS, gemm._ONEDNN_SPLIT), random(ROWS, ROWS), x)
    with torch.no_grad(), pytest.raises(RuntimeError):
        ops.matmul_into(torch.empty(ROWS, ROWS), x.t(), random(2 * gemm._ONEDNN_SPLIT, ROWS))


def test_products_of_16_bits_that_are_computed_in_float32_are_onednn_s_too(
    onednn: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RANK_CONSENSUS.in_float32, torch.bfloat16, frozenset(TRIALS))
    x, y, sums = random(ROWS, ROWS).bfloat16(), random(ROWS, ROWS).bfloat16(), torch.ones(ROWS, ROWS)
    expected = x.double() @ y.double()
    with torch.no_grad():
        products = ops.matmul(x, y), ops.linear(x, y.t().contiguous())
        ops.add_product(sums, x, y)
    assert len(onednn) == 2 + (gemm._onednn() is gemm._onednn_with_opaque_tensors)
    for product in products:
        assert product.dtype == torch.bfloat16
        assert float((product.double() - expected).abs().max()) <= 2.0**-8 * float(expected.abs().max())
    assert is_rounded(sums, expected + 1.0)


@pytest.mark.parametrize("rows", [2, 37])
def test_a_product_of_16_bits_is_rounded_once_before_it_is_added_or_not_at_all(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "_CAST_ELEMENTS", 64)  # 16 rows of 4 columns
    monkeypatch.setattr(sizes, "_MIN_CAST_ROWS", 8)
    multiplied: List[int] = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda x, y: multiplied.append(len(x)) or matmul(x, y))
    a, b = torch.full((rows, 3), 1.0 + 2.0**-7).bfloat16(), torch.full((3, 4), 1.0 + 2.0**-7).bfloat16()
    for has_kernel, expected in ((True, 3.046875), (False, 3.0 * (1.0 + 2.0**-7) ** 2)):
        monkeypatch.setitem(RANK_CONSENSUS.in_float32, torch.bfloat16, frozenset() if has_kernel else frozenset(TRIALS))
        sums = torch.ones(rows, 4)
        ops.add_product(sums, a, b)
        assert torch.equal(sums, torch.full((rows, 4), 1.0 + expected))
    assert multiplied == ([2] if rows == 2 else [16, 16, 5])  # one part at a time is cast; in float32 none is


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_rows_and_wide_rows_are_multiplied_into_given_memory_by_pytorch(dtype: Any, onednn: List[Any]) -> None:
    rows = gemm._MIN_ONEDNN_ROWS - (dtype == torch.float32)
    x, weight = random(rows, 40).to(dtype), random(24, 40).to(dtype)
    with torch.no_grad():
        product = ops.linear_into(torch.empty(rows, 24, dtype=dtype), x, weight)
    assert not onednn and torch.equal(product, torch.mm(x, weight.t()))


def test_products_that_do_not_suit_onednn_are_left_to_pytorch(
    onednn: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = gemm._MIN_ONEDNN_ROWS
    x, weight = random(rows, 16), random(8, 16)
    leaf = weight.clone().requires_grad_()
    ops.linear(x, leaf).sum().backward()  # its operator is unknown to autograd
    assert leaf.grad is not None and torch.allclose(leaf.grad, x.sum(0).expand(8, 16), atol=1e-4)
    with torch.no_grad():
        ops.linear(x.double(), weight.double())
        if compat.has_kernel("linear", torch.bfloat16):
            ops.linear(x.bfloat16(), weight.bfloat16())
        ops.linear(x[1:], weight)
        ops.linear(x[:0], weight)
        ops.linear(x[:, :0], weight[:, :0])
        ops.matmul(random(16, rows).t(), weight.t())
        monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", False)
        ops.linear(x, weight)
    assert not onednn


def test_onednn_is_used_where_it_was_measured_to_be_faster_unless_agreed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(gemm, "has_onednn", lambda: True)
    for speedup, is_faster in ((1.2, True), (1.01, False), (0.6, False)):
        monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", None)
        use_verdict_file(monkeypatch, tmp_path / "products.json", product_verdict("float32", threads, onednn=speedup))
        assert ops.uses_onednn_matmul() is is_faster
        ops.choose_onednn_matmul(not is_faster)  # as an earlier start of the run did, on whatever machine
        assert ops.uses_onednn_matmul() is not is_faster
    monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", None)
    use_verdict_file(monkeypatch, tmp_path / "products.json")
    assert not ops.uses_onednn_matmul()  # nothing has been measured
    use_verdict_file(monkeypatch, tmp_path / "products.json", product_verdict("float32", threads, onednn=1.2))
    monkeypatch.setattr(gemm, "has_onednn", lambda: False)
    assert not ops.uses_onednn_matmul()


def _takes_no_operands() -> Any:
    pass


WRONG = [refuses, _takes_no_operands, lambda x, weight, *_: torch.zeros(len(x), len(weight))]


@pytest.mark.parametrize("wrong", WRONG)
def test_an_operator_of_onednn_that_fails_or_computes_something_else_is_not_used(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gemm._onednn_with_opaque_tensors
    monkeypatch.setattr(gemm, "_onednn_with_plain_tensors", wrong)
    assert gemm._onednn.__wrapped__() is (own if gemm._is_correct(own) else None)
    monkeypatch.setattr(gemm, "_onednn_with_opaque_tensors", wrong)
    assert gemm._onednn.__wrapped__() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_16_bits_without_a_kernel_are_rounded_once_into_given_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RANK_CONSENSUS.in_float32, dtype, frozenset(TRIALS))
    ops.choose_native_kernels(False)
    x, weight = random(20, 40).to(dtype), random(30, 40).to(dtype)
    judge = x.double() @ weight.double().t()
    memory = torch.zeros(21, 30, dtype=dtype)
    for into, other in ((ops.linear_into, weight), (ops.matmul_into, weight.t())):
        with torch.no_grad():
            assert into(memory[:-1], x, other).data_ptr() == memory.data_ptr()
        assert bool(((memory[:-1].double() - judge).abs() <= 0.51 * torch.finfo(dtype).eps * judge.abs() + 1e-6).all())
        assert bool((memory[-1] == 0).all())
        memory.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(700,), (2, 350), (1, 5, 7)], ids=str)
@pytest.mark.parametrize("used", [True, False], ids=["in blocks", "another allocator's"])
def test_products_are_pytorch_s_own_to_the_bit_in_blocks_or_not(
    used: bool, shape: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_pool, "_is_enabled", used)
    monkeypatch.setitem(RANK_CONSENSUS.in_float32, dtype, frozenset())
    monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", False)
    ops.choose_native_kernels(False)
    x, weight, bias = (tensor.to(dtype) for tensor in (random(*shape, 40), random(800, 40), random(800)))
    rows = x.view(-1, 40)  # of three dimensions older builds round the product before they add the bias
    with torch.no_grad():
        for product, expected in (
            (ops.linear(x, weight, bias), F.linear(rows, weight, bias)),
            (ops.linear(x, weight), F.linear(rows, weight)),
            (ops.matmul(x, weight.t()), torch.matmul(rows, weight.t())),
        ):
            assert product.dtype == dtype and not product._is_view()
            assert product.shape == (*shape, 800) and torch.equal(product.view(-1, 800), expected)
