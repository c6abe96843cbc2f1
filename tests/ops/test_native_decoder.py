"""Tests of our own compiled RMSNorm, SwiGLU and rotation, each against its definition in float64, in any shape."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.kernels import library_file
from fugaku_gpt.ops import native, rotary
from fugaku_gpt.ops.rotary import rotation
from tests.ops.inputs import numbers

pytestmark = [
    pytest.mark.skipif(not library_file().exists(), reason="no compiled kernels: fugaku-gpt env kernels"),
    pytest.mark.usefixtures("threads"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check_close(actual: Sequence[Optional[torch.Tensor]], expected: Sequence[Optional[torch.Tensor]]) -> None:
    """Compares results with those in float64, up to roundings of the largest number."""
    for ours, right in zip(actual, expected):
        assert ours is not None and right is not None and ours.shape == right.shape
        tolerance = 1e-2 if ours.dtype == torch.bfloat16 else 2e-5
        assert float((ours.double() - right.double()).abs().max()) <= tolerance * max(
            1.0, float(right.double().abs().max())
        )


def check_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares results with those in float64, up to two roundings of each number."""
    eps = torch.finfo(actual.dtype).eps
    assert bool(((actual.double() - expected).abs() <= 2.0 * eps * expected.abs() + 2e-6).all())


def rms_norm_and_gradients(x: torch.Tensor, weight: torch.Tensor, y_grad: torch.Tensor, eps: float) -> Tuple[Any, ...]:
    y, scales = native.rms_norm(x, weight, eps)
    return (y, *native.rms_norm_gradient(y_grad, x, weight, scales))


@DTYPES
@settings(max_examples=40)
@given(
    rows=st.integers(1, 200),
    width=st.integers(1, 300),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_rms_norm_is_that_in_float64_rounded(
    dtype: torch.dtype, rows: int, width: int, spread: float, seed: int
) -> None:
    x, weight = numbers(rows, width, seed=seed, spread=spread).to(dtype), numbers(width, seed=seed + 1).float()
    y_grad = numbers(rows, width, seed=seed + 2).to(dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = leaves[0] / torch.sqrt((leaves[0] ** 2).mean(-1, keepdim=True) + 1e-2) * leaves[1]
    gradients = torch.autograd.grad(expected, leaves, y_grad.double())
    results = rms_norm_and_gradients(x, weight, y_grad, 1e-2)
    assert [tensor.dtype for tensor in results] == [dtype, dtype, torch.float32]
    check_close(results, (expected.detach(), *gradients))


@DTYPES
def test_rows_in_groups_with_gaps_are_normalised_in_their_memory(dtype: torch.dtype) -> None:
    spaced, weight = numbers(2, 3, 2, 5, 24).to(dtype), numbers(20).float()
    x, y_grad = spaced[:, :, 1, 1:, :20], numbers(2, 3, 4, 20, seed=1).to(dtype)
    assert native.has_even_steps(x) and not native.has_even_steps(x.transpose(-1, -2))
    results = rms_norm_and_gradients(x, weight, y_grad, 1e-5)
    assert all(map(torch.equal, results, rms_norm_and_gradients(x.contiguous(), weight, y_grad, 1e-5)))
    (row,) = native.rms_norm(x[0, 0, 0].contiguous(), weight, 1e-5)[:1]
    assert torch.equal(row, results[0][0, 0, 0])
    assert not native.has_even_steps(numbers(2, 3, 5, 4, 20)[:, :2])  # a gap of another size between the samples


@DTYPES
def test_a_row_with_nan_stays_nan_in_rms_norm(dtype: torch.dtype) -> None:
    x = torch.ones(7, 40).to(dtype)
    x[1, 7] = math.nan
    y, x_grad, weight_grad = rms_norm_and_gradients(x, torch.ones(40), torch.ones_like(x), 1e-5)
    is_finite = [True, False, *[True] * 5]
    assert (y == y).all(1).tolist() == is_finite and (x_grad == x_grad).all(1).tolist() == is_finite
    assert bool((weight_grad != weight_grad).all())


@pytest.mark.parametrize("size", [1e-25, 1e15], ids="numbers of {:g}".format)
def test_rms_norm_of_small_and_large_numbers_has_finite_gradients(size: float) -> None:
    x, weight = (size * numbers(9, 50)).float(), numbers(50, seed=1).float()
    y_grad = numbers(9, 50, seed=2).float()
    y, x_grad, _ = rms_norm_and_gradients(x, weight, y_grad, 1e-5)
    leaf = x.double().requires_grad_()
    expected = leaf / torch.sqrt((leaf**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    (gradient,) = torch.autograd.grad(expected, leaf, y_grad.double())
    for actual, right in ((y, expected.detach()), (x_grad, gradient)):
        assert float((actual.double() - right).abs().max()) <= 1e-5 * float(right.abs().max())


def swiglu_of(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU in float64."""
    gate, up = x.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@DTYPES
@settings(max_examples=40)
@given(
    rows=st.integers(1, 7),
    width=st.sampled_from([1, 7, 16, 64, 103, 1023, 1024, 1025, 2200]),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_swiglu_is_the_formula_in_float64_rounded(
    dtype: torch.dtype, rows: int, width: int, spread: float, seed: int
) -> None:
    x = numbers(rows, 2 * width, seed=seed, spread=spread).to(dtype)
    y_grad = numbers(rows, width, seed=seed + 1).to(dtype)
    leaf = x.double().requires_grad_()
    expected = swiglu_of(leaf)
    (gradient,) = torch.autograd.grad(expected, leaf, y_grad.double())
    y, x_grad = native.swiglu(x), native.swiglu_gradient(y_grad, x)
    assert y.dtype == x_grad.dtype == dtype
    if dtype == torch.bfloat16:
        check_rounded(y, expected.detach())
        check_rounded(x_grad, gradient)
    check_close((y, x_grad), (expected.detach(), gradient))


def test_silu_of_large_negative_numbers_keeps_all_digits() -> None:
    gate = torch.linspace(-86.0, 86.0, 5000)
    x = torch.cat([gate, torch.ones_like(gate)])
    expected = swiglu_of(x)
    assert bool(((native.swiglu(x).double() - expected).abs() <= 1e-6 * expected.abs()).all())


@DTYPES
def test_swiglu_of_nan_infinity_and_huge_numbers(dtype: torch.dtype) -> None:
    gate = torch.tensor([math.nan, math.inf, 1e30, -1e30, 0.0] * 30)
    x = torch.cat([gate, torch.ones_like(gate)]).to(dtype)
    y = native.swiglu(x)
    assert bool((y[0::5] != y[0::5]).all()) and bool((y[1::5] == math.inf).all())
    assert torch.equal(y[2::5], x[2:150:5]) and bool((y[3::5] == 0.0).all()) and bool((y[4::5] == 0.0).all())
    gate_grad, up_grad = native.swiglu_gradient(torch.ones_like(y), x).chunk(2)
    assert bool((gate_grad[0::5] != gate_grad[0::5]).all()) and bool((gate_grad[4::5] == 0.5).all())
    assert bool((gate_grad[2::5] == 1.0).all()) and bool((gate_grad[3::5].abs() <= 1e-30).all())
    assert torch.equal(up_grad[1:4], y[1:4]) and bool((up_grad[0::5] != up_grad[0::5]).all())


def test_a_gate_of_minus_infinity_gives_nan_by_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for use in (True, False):
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", use)
        assert bool(torch.isnan(ops.swiglu(torch.tensor([-math.inf, 1.0]))).all())


ROPE = ModelConfig(hidden=48, heads=6, seq_len=20, positions="rope")


def rotated(x: torch.Tensor, angles: Tuple[torch.Tensor, torch.Tensor], sign: float) -> torch.Tensor:
    """Rotates [shards, b, tokens, n, d] in float64."""
    left, right = x.double().chunk(2, -1)
    cosines, sines = angles[0].double(), sign * angles[1].double()
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], -1)


@DTYPES
@settings(max_examples=60)
@given(
    shards=st.integers(1, 3),
    samples=st.integers(1, 3),
    tokens=st.integers(1, 9),
    heads=st.integers(1, 4),
    half=st.sampled_from([1, 3, 8, 16, 20, 32, 37, 64]),
    gaps=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    backwards=st.booleans(),
)
def test_a_rotation_is_that_in_float64_rounded_between_tensors_with_gaps(
    dtype: torch.dtype,
    shards: int,
    samples: int,
    tokens: int,
    heads: int,
    half: int,
    gaps: Tuple[int, int],
    backwards: bool,
) -> None:
    angles = tuple(numbers(shards, 1, tokens, 1, half, seed=seed).float() for seed in (1, 2))
    wide = numbers(shards, samples, tokens, heads + gaps[0], 2 * half).to(dtype)
    outer = torch.full((shards, samples, tokens, 2, heads, 1 + gaps[1], 2 * half), 7.0, dtype=dtype)
    x, out = wide[:, :, :, gaps[0] :], outer[:, :, :, 1, :, gaps[1]]
    assert native.has_native_rotation(out, x, *angles)
    native.rotate_into(out, x, *angles, backwards)
    check_rounded(out, rotated(x, angles, -1.0 if backwards else 1.0))  # type: ignore[arg-type]
    out.fill_(7.0)
    assert bool((outer == 7.0).all())


def test_heads_that_the_kernel_cannot_step_through_and_other_types_are_left_to_pytorch() -> None:
    x, angles = torch.zeros(2, 3, 4, 2, 8), [torch.zeros(2, 1, 4, 1, 4)] * 2
    assert native.has_native_rotation(x, x, *angles)
    padded = torch.zeros(2, 3, 5, 2, 8)[:, :, :4]  # a gap after each sample
    for out, source in ((x, padded), (padded, x), (x, torch.zeros(2, 3, 4, 2, 16)[..., ::2]), (x, x.bfloat16())):
        assert not native.has_native_rotation(out, source, *angles)
    assert not native.has_native_rotation(x.half(), x.half(), *angles)
    assert not native.has_native_rotation(x.double(), x.double(), *(angle.double() for angle in angles))
    assert not native.has_native_rotation(x, x, *[torch.zeros(2, 1, 4, 1, 8)[..., ::2]] * 2)


def test_a_padded_tensor_is_rotated_all_the_same() -> None:
    x, angles = numbers(2, 3, 5, 6, 8).float()[:, :, :4], rotation(ROPE, 2, 4, torch.float32)
    out = torch.empty(2, 3, 4, 6, 8)
    rotary._rotate_into(out, x, angles, False)
    check_rounded(out, rotated(x, angles, 1.0))


def by_each_way(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> List[List[Optional[torch.Tensor]]]:
    """Results and gradients of a function by the kernels, and by PyTorch's operators."""
    results: List[List[Optional[torch.Tensor]]] = []
    for use in (True, False):
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", use)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        y = function(*leaves)
        y.backward(numbers(*y.shape, seed=9).to(y.dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    return results


@DTYPES
def test_kernels_by_autograd_are_the_operators(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(2, 9, 40).to(dtype), numbers(40).float()
    turned = numbers(40, 9).to(dtype).t()
    heads = [numbers(2, 3, 5, count, 8, seed=count).to(dtype) for count in (6, 2, 2)]
    angles = rotation(ROPE, 2, 5, dtype)
    for function, inputs in (
        (lambda x, weight: ops.rms_norm(x, weight, 1e-5), (x, weight)),
        (lambda x: ops.rms_norm(x.transpose(0, 1), weight, 1e-5), (x,)),
        (ops.swiglu, (turned,)),
        (lambda q, k, v: ops.pack_heads(q, k, v, angles), heads),
    ):
        ours, judge = by_each_way(function, inputs, monkeypatch)
        assert all(a is not None and b is not None and a.dtype == b.dtype for a, b in zip(ours, judge))
        check_close(ours, judge)


@pytest.mark.parametrize("count", [1, 15, 16, 1000, 5003])
def test_results_in_16_bits_are_those_in_float32_rounded_as_pytorch_rounds(count: int) -> None:
    x, weight = numbers(3, 2 * count).bfloat16(), numbers(2 * count).float()
    assert torch.equal(native.swiglu(x), native.swiglu(x.float()).bfloat16())
    (y, _), (judge, _) = (native.rms_norm(inputs, weight, 1e-5) for inputs in (x, x.float()))
    assert torch.equal(y, judge.bfloat16())
    angles = [numbers(1, 1, 3, 1, count, seed=seed).float() for seed in (1, 2)]
    heads = x.view(1, 1, 3, 1, 2 * count)
    out, wide = torch.empty_like(heads), torch.empty_like(heads, dtype=torch.float32)
    native.rotate_into(out, heads, *angles, False)
    native.rotate_into(wide, heads.float(), *angles, False)
    assert torch.equal(out, wide.bfloat16())
