"""Tests of our own compiled kernels, each against its definition in float64, in any shape."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Iterator, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import compat, ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.kernels import library_file
from fugaku_gpt.model.attention import attend_naively
from fugaku_gpt.ops import native
from tests.ops.inputs import key_ranges, numbers

pytestmark = [
    pytest.mark.skipif(not library_file().exists(), reason="no compiled kernels: fugaku-gpt env kernels"),
    pytest.mark.usefixtures("threads"),
]

TYPES = {
    torch.float32: 3e-6,
    torch.bfloat16: 2.0**-5,
}  # and the largest error relative to the largest value
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)


def is_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return float((actual.double() - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1e-30)


def test_compiled_kernels_are_used() -> None:
    assert ops.has_native_kernels() and ops.uses_native_kernels()


def test_kernels_that_compute_wrong_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fugaku_gpt.kernels.check.failures", lambda library, threads: ["gelu: 1 instead of 2"])
    native.native_kernels_problem.cache_clear()
    try:
        assert ops.native_kernels_problem() == "they compute wrong results: gelu: 1 instead of 2"
        assert not ops.has_native_kernels() and not ops.uses_native_kernels()
    finally:
        monkeypatch.undo()
        native.native_kernels_problem.cache_clear()
    assert ops.has_native_kernels()


def attention_and_gradient(
    packed: torch.Tensor, y_grad: torch.Tensor, flags: Any = None, factor: float = 1.0, ranges: Any = None
) -> Tuple[torch.Tensor, torch.Tensor]:
    if ranges is None:
        ranges = ops.KeyRanges.causal(packed.shape[0] * packed.shape[2])
    y, log_sums = ops.attention(packed, y_grad.shape[3], ranges, flags, factor)
    return y, ops.attention_gradient(y_grad, packed, y, log_sums, ranges, flags, factor)


@DTYPES
@settings(max_examples=40)
@given(
    shards=st.integers(1, 3), samples=st.integers(1, 3), local_length=st.sampled_from([1, 2, 31, 64, 65, 96, 97, 150]),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2), (4, 4)]),
    width=st.sampled_from([1, 4, 8, 16, 20, 64, 80, 128]), spread=st.sampled_from([0.1, 1.0, 5.0]), drops=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_attention_equals_the_definition(
    dtype: torch.dtype,
    shards: int,
    samples: int,
    local_length: int,
    heads: Tuple[int, int],
    width: int,
    spread: float,
    drops: bool,
    data: st.DataObject,
) -> None:
    (query_heads, kv_heads), seed = heads, data.draw(st.integers(0, 99))
    slots = query_heads + 2 * kv_heads
    packed = numbers(shards, samples, local_length, slots, width, seed=seed, spread=spread).to(dtype)
    y_grad = numbers(shards, samples, local_length, query_heads, width, seed=seed + 1).to(dtype)
    length, keep_flags, share = shards * local_length, None, 0.0
    ranges = data.draw(key_ranges(samples, length))
    if drops:
        share = 0.25
        flags = numbers(samples, query_heads, length, length, seed=seed + 2) > -0.67
        keep_flags = lambda: flags  # noqa: E731
    drawn = keep_flags() if keep_flags else None
    results = attention_and_gradient(packed, y_grad, drawn, 1.0 / (1.0 - share), ranges)
    leaf = packed.double().requires_grad_()
    expected = attend_naively(leaf, query_heads, keep_flags, share, ranges=ranges)
    expected.backward(y_grad.double())
    assert leaf.grad is not None and all(tensor.dtype == dtype for tensor in results)
    tolerance = TYPES[dtype] * max(1.0, spread**2)  # larger scores have larger roundings
    assert is_close(results[0], expected.detach(), tolerance) and is_close(results[1], leaf.grad, tolerance)


def test_gradients_of_shared_keys_are_rounded_once() -> None:
    """A token that sees only itself has its output's gradient as its value's. That of 8 heads is half a rounding of the
    first head's each."""
    packed, y_grad = numbers(1, 1, 1, 11, 8).bfloat16(), torch.full((1, 1, 1, 9, 8), 2.0**-9).bfloat16()
    y_grad[:, :, :, 0] = 1.0
    grad = attention_and_gradient(packed, y_grad)[1]
    assert grad[0, 0, 0, 10].tolist() == [1.0 + 2.0**-6] * 8


def test_ranges_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of 2 samples of 20 tokens"):
        ops.attention(torch.zeros(2, 2, 10, 3, 4), 1, ops.KeyRanges.causal(10), None, 1.0)


@DTYPES
def test_the_future_has_no_influence(dtype: torch.dtype) -> None:
    x = numbers(1, 1, 200, 6, 8).to(dtype)
    other = x.clone()
    other[:, :, 150:] = 9.0
    first, second = (ops.attention(y, 2, ops.KeyRanges.causal(200), None, 1.0)[0][:, :, :150] for y in (x, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("width", [8, 48])
def test_scores_of_any_size_do_not_overflow(width: int) -> None:
    x = numbers(1, 1, 130, 3, width).float()
    for spread in (1e3, 1e10):
        y, grad = attention_and_gradient(spread * x, torch.ones(1, 1, 130, 1, width))
        assert bool(torch.isfinite(y).all()) and bool(torch.isfinite(grad).all())


@DTYPES
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_appear_from_their_position_on(bad: float, which: int, dtype: torch.dtype) -> None:
    x = numbers(1, 1, 130, 6, 8).to(dtype)
    x[0, 0, 70, 2 * which + 1] = bad
    y, grad = attention_and_gradient(x, torch.ones(1, 1, 130, 2, 8, dtype=dtype))
    finite = torch.isfinite(y.float()).all(-1)[0, 0]
    assert bool(finite[:, 0].all()) and not bool(finite[70, 1])
    assert which == 2 or bool(finite[:70, 1].all())  # all values of a block are multiplied, some of them by 0
    assert not bool(torch.isfinite(grad[:, :, :, 1::2].float()).all())


def test_gradients_with_gaps_in_memory_are_accepted() -> None:
    x, wide = numbers(1, 2, 40, 6, 8).float(), numbers(1, 2, 40, 2, 16).float()
    gradient = attention_and_gradient(x, wide[..., ::2])[1]
    assert torch.equal(gradient, attention_and_gradient(x, wide[..., ::2].contiguous())[1])


def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    x, y_grad = numbers(1, 3, 100, 10, 16).float(), numbers(1, 3, 100, 6, 16).float()
    logits, many = numbers(40, 999).float(), numbers(200_001).float()
    results = (*attention_and_gradient(x, y_grad), ops.loss_full_rows_(logits, 1.0, True), logits)
    norm = ops.sum_of_squares(many)
    torch.set_num_threads(2)
    logits = numbers(40, 999).float()
    again = (*attention_and_gradient(x, y_grad), ops.loss_full_rows_(logits, 1.0, True), logits)
    assert all(map(torch.equal, results, again)) and norm == ops.sum_of_squares(many)


@settings(max_examples=40)
@given(rows=st.integers(0, 200), width=st.integers(1, 400), seed=st.integers(0, 99))
def test_numbers_in_16_bits_are_added_up_in_float32(rows: int, width: int, seed: int) -> None:
    x, sums = numbers(rows, width, seed=seed).bfloat16(), numbers(rows, width, seed=seed + 1).float()
    expected = sums + x.float()
    assert native.has_native_accumulate(x, sums)
    native.accumulate_(sums, x)
    assert torch.equal(sums, expected)
    row_sums = ops.sum_of_rows(x)
    assert row_sums.dtype == torch.float32 and row_sums.shape == (width,)
    assert float((row_sums.double() - x.double().sum(0)).abs().max()) <= 1e-6 * max(
        1.0, float(x.double().abs().sum(0).max())
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.equal(row_sums, ops.sum_of_rows(x))
    torch.set_num_threads(threads)


def test_a_product_in_16_bits_is_added_to_sums_with_gaps_too() -> None:
    x, y = numbers(40, 30).bfloat16(), numbers(30, 20).bfloat16()
    compat.choose_float32_operations(
        compat.operations_without_kernel(torch.bfloat16), torch.bfloat16
    )  # however slow products are
    contiguous, strided = torch.zeros(40, 20), torch.zeros(40, 40)[:, ::2]
    for sums in (contiguous, strided):
        ops.add_product(sums, x, y)
        ops.add_product(sums, x, y)
    expected = 2.0 * (x.double() @ y.double())
    assert is_close(contiguous, expected, 1e-2) and is_close(strided, expected, 1e-2)
    assert not native.has_native_accumulate(x, torch.zeros(40, 30).double()) and not native.has_native_accumulate(
        x.float()
    )
    with pytest.raises(RuntimeError):
        ops.add_product(torch.zeros(40, 19), x, y)
    assert not native.has_native_accumulate(x, torch.zeros(40, 20)) and not native.has_native_accumulate(x[:, ::2])


def test_few_heads_for_many_threads_and_other_types_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 4, 9, 8)
    assert ops.has_native_attention(x, 3) and ops.has_native_attention(x.bfloat16(), 3)
    assert not ops.has_native_attention(x.double(), 3) and not ops.has_native_attention(x.half(), 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    assert not ops.has_native_attention(x, 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    assert ops.has_native_attention(x, 3)
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", False)
    assert not ops.has_native_attention(x, 3) and not ops.uses_native_kernels() and ops.has_native_kernels()


@DTYPES
@settings(max_examples=60)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 2100), gap=st.integers(0, 3),
    spread=st.sampled_from([0.1, 3.0, 40.0]), scale=st.sampled_from([1.0, 0.25, 1024.0]),
    shift=st.sampled_from([0.0, 100.0, -3000.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_of_logits_become_their_probabilities(
    dtype: torch.dtype, rows: int, columns: int, gap: int, spread: float, scale: float, shift: float, seed: int
) -> None:
    padded_logits = (numbers(rows, columns + gap, seed=seed, spread=spread) + shift).to(dtype)
    wide = padded_logits[:, :columns].double()
    expected_log_sums, expected = torch.logsumexp(wide, 1), scale * torch.softmax(wide, 1)
    gradient, unchanged, in_two_steps = padded_logits.clone(), padded_logits.clone(), padded_logits.clone()
    row_log_sums = ops.loss_full_rows_(gradient[:, :columns], scale, True)
    assert torch.equal(row_log_sums, ops.loss_full_rows_(unchanged[:, :columns], scale, False)) and torch.equal(
        unchanged, padded_logits
    )
    largest, sums = ops.loss_sums(in_two_steps[:, :columns])
    assert torch.equal(largest.double(), wide.max(1)[0])
    assert is_close(sums, (wide - wide.max(1, keepdim=True)[0]).exp().sum(1), 1e-5)
    ops.loss_gradient_(in_two_steps[:, :columns], row_log_sums, scale)
    assert torch.equal(in_two_steps, gradient) and torch.equal(gradient[:, columns:], padded_logits[:, columns:])
    assert is_close(row_log_sums, expected_log_sums, 1e-6)
    # logits and the logarithms of their sums are rounded as well
    assert is_close(gradient[:, :columns], expected, TYPES[dtype] + 2e-7 * float(padded_logits.float().abs().max()))


def test_the_sum_over_no_columns_is_zero() -> None:
    largest, sums = ops.loss_sums(torch.zeros(3, 0))
    assert bool((largest == torch.finfo(torch.float32).min).all()) and bool((sums == 0.0).all())


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_not_lost(bad: float, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50).to(dtype)
    logits[1, 20] = bad
    log_sums = ops.loss_full_rows_(logits, 1.0, True)
    assert torch.isfinite(log_sums).tolist() == [True, False, True]
    assert not bool(torch.isfinite(logits[1].float()).all())


@DTYPES
@settings(max_examples=40)
@given(rows=st.integers(1, 200), width=st.integers(1, 300), shift=st.sampled_from([0.0, 5.0]), seed=st.integers(0, 99))
def test_layer_norm_is_that_in_float64_rounded(
    dtype: torch.dtype, rows: int, width: int, shift: float, seed: int
) -> None:
    x = (numbers(rows, width, seed=seed) + shift).to(dtype)
    weight, bias = numbers(width, seed=seed + 1).float(), numbers(width, seed=seed + 2).float()
    y_grad = numbers(rows, width, seed=seed + 3).to(dtype)
    y, statistics = native.layer_norm(x, weight, bias, 1e-2)
    results = (y, *native.layer_norm_gradient(y_grad, x, weight, statistics))
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    judge = F.layer_norm(leaves[0], (width,), leaves[1], leaves[2], 1e-2)
    expected = (judge.detach(), *torch.autograd.grad(judge, leaves, y_grad.double()))
    for tensor, right in zip(results, expected):
        tolerance = 1e-2 if tensor.dtype == torch.bfloat16 else 2e-5
        assert float((tensor.double() - right).abs().max()) <= tolerance * max(1.0, float(right.abs().max()))


@DTYPES
def test_layer_norm_by_autograd_is_that_of_the_operators(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = numbers(2, 9, 40).to(dtype), numbers(40).float(), numbers(40, seed=1).float()
    y_grad = numbers(2, 9, 40, seed=2).to(dtype)
    results = []
    for use in (True, False):
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", use)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = ops.layer_norm(*leaves, 1e-5)
        y.backward(y_grad)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for ours, judge in zip(*results):
        assert ours is not None and judge is not None and ours.dtype == judge.dtype
        tolerance = 1e-2 if ours.dtype == torch.bfloat16 else 1e-5
        assert is_close(ours, judge.double(), tolerance)


@DTYPES
def test_a_row_with_nan_stays_nan_in_layer_norm(dtype: torch.dtype) -> None:
    x = torch.ones(3, 40).to(dtype)
    x[1, 7] = math.nan
    y, statistics = native.layer_norm(x, torch.ones(40), torch.zeros(40), 1e-5)
    assert (y == y).all(1).tolist() == [True, False, True]
    _, weight_grad, _ = native.layer_norm_gradient(torch.ones_like(x), x, torch.ones(40), statistics)
    assert bool((weight_grad != weight_grad).any())


def gelu_and_slope(x: torch.Tensor, by_tanh: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """GELU and its slope in float64; the exact GELU keeps the digits at large negative x that 1 + erf(x) would lose."""
    x = x.double()
    if by_tanh:
        z, slope = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3), math.sqrt(2.0 / math.pi) * (1 + 0.134145 * x**2)
        share = torch.sigmoid(2.0 * z)
        return x * share, share + 2.0 * x * share * (1.0 - share) * slope
    share = 0.5 * torch.erfc(-x * math.sqrt(0.5))
    return x * share, share + x * torch.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)


@pytest.mark.parametrize("by_tanh", [False, True], ids=["exact", "by tanh"])
@DTYPES
@settings(max_examples=40)
@given(count=st.integers(1, 9000), spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]), seed=st.integers(0, 99))
def test_gelu_is_the_formula_in_float64_rounded(
    dtype: torch.dtype, by_tanh: bool, count: int, spread: float, seed: int
) -> None:
    x, y_grad = numbers(count, seed=seed, spread=spread).to(dtype), numbers(count, seed=seed + 1).to(dtype)
    y, slope = gelu_and_slope(x, by_tanh)
    eps = torch.finfo(dtype).eps
    for actual, expected in (
        (native.gelu(x, by_tanh), y),
        (native.gelu_gradient(y_grad, x, by_tanh), y_grad.double() * slope),
    ):
        assert actual.dtype == dtype
        assert bool(((actual.double() - expected).abs() <= 2.0 * eps * expected.abs() + 2e-6).all())


def test_the_exact_gelu_of_large_negative_numbers_keeps_all_digits() -> None:
    x = torch.linspace(-12.0, 0.0, 5000)
    expected, _ = gelu_and_slope(x, False)
    actual = native.gelu(x, False).double()
    assert bool(((actual - expected).abs() <= 1e-5 * expected.abs()).all())  # PyTorch's are 0 from -6 on


@pytest.mark.parametrize("count", [1, 15, 16, 1000, 5003])
def test_results_in_16_bits_are_those_in_float32_rounded_as_pytorch_rounds(count: int) -> None:
    x = numbers(3, count).bfloat16()
    assert torch.equal(native.gelu(x, False), native.gelu(x.float(), False).bfloat16())
    weight, bias = numbers(count).float(), numbers(count, seed=1).float()
    (y, _), (judge, _) = (native.layer_norm(inputs, weight, bias, 1e-5) for inputs in (x, x.float()))
    assert torch.equal(y, judge.bfloat16())


@pytest.mark.parametrize("by_tanh", [False, True], ids=["exact", "by tanh"])
@DTYPES
def test_gelu_of_nan_and_infinity(dtype: torch.dtype, by_tanh: bool) -> None:
    x = torch.tensor([math.nan, math.inf, 1e30, -1e30, 0.0] * 30).to(dtype)
    y = native.gelu(x, by_tanh)
    assert bool((y[0::5] != y[0::5]).all()) and bool((y[1::5] == math.inf).all()) and torch.equal(y[2::5], x[2::5])
    assert bool((y[3::5].abs() <= 1e-6).all()) and bool((y[4::5] == 0.0).all())
    slope = native.gelu_gradient(torch.ones_like(x), x, by_tanh)
    assert bool((slope[0::5] != slope[0::5]).all()) and bool((slope[4::5] == 0.5).all())
    assert bool((slope[1::5] == 1.0).all()) and bool((slope[2::5] == 1.0).all())
    assert bool((slope[3::5].abs() <= 1e-30).all())


@pytest.mark.parametrize("function", [ops.gelu, ops.gelu_tanh], ids=["exact", "by tanh"])
@DTYPES
def test_gelu_by_autograd_is_that_of_the_operators(
    dtype: torch.dtype, function: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y_grad = numbers(9, 40).to(dtype).t(), numbers(40, 9, seed=2).to(dtype)
    results = []
    for use in (True, False):
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", use)
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(y_grad)
        results.append((y.detach(), leaf.grad))
    for ours, judge in zip(*results):
        assert ours is not None and judge is not None and ours.dtype == judge.dtype
        assert is_close(ours, judge.double(), 1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("count", [1, 7, 128, 129, 4096, 500_000])
@pytest.mark.parametrize("behind", [0, 1, 8], ids="aligned but for {}".format)
def test_adamw_rounds_new_parameters_as_pytorch_rounds(count: int, behind: int) -> None:
    parameters, gradients = numbers(count).float(), numbers(count, seed=1).float()
    moments = (numbers(count, seed=2).float(), numbers(count, seed=3).float() ** 2)
    (p, g, m, v), before = (tensor.double() for tensor in (parameters, gradients, *moments)), gradients.clone()
    rounded = torch.zeros(behind + count, dtype=torch.bfloat16)[behind:]
    step = ops.AdamWStep(divisor=3.0, keeps=0.99, betas=(0.9, 0.999), step_size=0.1, eps=0.01)
    ops.step_adamw(parameters, gradients, moments, rounded, step)
    m, v = 0.9 * m + 0.1 * (g / 3.0), 0.999 * v + 0.001 * (g / 3.0) ** 2
    p = 0.99 * p - 0.1 * m / (v.sqrt() + 0.01)
    assert is_close(parameters, p, 1e-6) and is_close(moments[0], m, 1e-6) and is_close(moments[1], v, 1e-6)
    assert torch.equal(rounded, parameters.bfloat16()) and torch.equal(gradients, before)


def test_numbers_are_rounded_to_16_bits_as_pytorch_rounds_them() -> None:
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64)  # of all exponents and signs, ties among them
    bits = torch.cat([bits, torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF])])
    x = torch.from_numpy(bits.numpy().astype("uint32").view("float32"))
    x = x[~(x != x) | (bits == 0x7FFFFFFF)]  # of the NaNs, the one whose bits alone would round to a number
    rounded = torch.zeros(len(x), dtype=torch.bfloat16)
    moments = (torch.zeros_like(x), torch.ones_like(x))
    step = ops.AdamWStep(divisor=1.0, keeps=1.0, betas=(0.9, 0.9), step_size=0.0, eps=1.0)
    ops.step_adamw(x, torch.zeros_like(x), moments, rounded, step)
    actual, expected = rounded.float(), x.bfloat16().float()
    is_nan = expected != expected
    assert torch.equal(actual != actual, is_nan) and int(is_nan.sum()) == 1
    assert torch.equal(actual.masked_fill(is_nan, 7.0), expected.masked_fill(is_nan, 7.0))


def test_a_team_of_fewer_threads_than_asked_for_does_all_the_work() -> None:
    program = (
        "import torch; torch.set_num_threads(3)\n"
        "from fugaku_gpt import compat, ops\n"
        "from fugaku_gpt.kernels import load_library\n"
        "from fugaku_gpt.kernels.trials import failures\n"
        "assert torch.get_num_threads() == 3 and ops.has_native_kernels()\n"
        "assert failures(load_library(), 3) == []\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Calls:
    """Records the thread of each call."""

    def __init__(self) -> None:
        self.threads: List[int] = []

    def __call__(self) -> None:
        self.threads.append(threading.get_ident())


@pytest.fixture
def calls() -> Iterator[Calls]:
    yield Calls()
    ops.set_progress_callback(None, 0.0)


@DTYPES
def test_long_kernels_call_back_between_blocks_and_compute_the_same(dtype: torch.dtype, calls: Calls) -> None:
    qkv, above = numbers(1, 2, 300, 6, 16).to(dtype), numbers(1, 2, 300, 2, 16, seed=3).to(dtype)
    x, weight = numbers(500, 300, seed=1).to(dtype), numbers(300, 700, seed=2).to(dtype)

    def results() -> List[torch.Tensor]:
        product = torch.zeros(500, 700, dtype=dtype)
        tensors = list(attention_and_gradient(qkv, above))
        if native._library().supports_gemm(native._NATIVE_TYPES[dtype]):
            native.matmul_(product, x, weight)
            tensors.append(product)
        return tensors

    without = results()
    assert not calls.threads
    ops.set_progress_callback(calls, 0.0)
    for expected, actual in zip(without, results()):
        assert torch.equal(expected, actual)
    deadline = time.monotonic() + 60
    while not calls.threads:  # heads go to whichever thread is free: the first one may have had none
        assert time.monotonic() < deadline
        results()
    assert set(calls.threads) == {threading.get_ident()}
    seen = len(calls.threads)
    ops.set_progress_callback(calls, 3600.0)
    results()
    ops.set_progress_callback(None, 0.0)
    results()
    assert len(calls.threads) == seen
