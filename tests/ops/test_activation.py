"""Tests that each kernel of GELU, and SwiGLU, computes its formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fugaku_gpt import ops
from fugaku_gpt.compat import probes
from fugaku_gpt.ops import activation
from tests.ops.inputs import SIXTEEN_BITS, random


@pytest.mark.parametrize("has_approximate", [True, False])
def test_gelu_tanh_follows_the_formula_with_and_without_the_kernel(
    has_approximate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_approximate and not probes._GELU_HAS_APPROXIMATE:
        pytest.skip("this PyTorch has no tanh kernel of GELU")
    monkeypatch.setattr(probes, "_GELU_HAS_APPROXIMATE", has_approximate)
    x = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    y = ops.gelu_tanh(x)
    y.sum().backward()
    for point, value, slope in zip(x.tolist(), y.tolist(), x.grad.tolist()):  # type: ignore[union-attr]
        scale = math.sqrt(2 / math.pi)
        t = math.tanh(scale * (point + 0.044715 * point**3))
        assert value == pytest.approx(0.5 * point * (1 + t), abs=1e-14)
        expected = 0.5 * (1 + t) + 0.5 * point * (1 - t * t) * scale * (1 + 3 * 0.044715 * point * point)
        assert slope == pytest.approx(expected, abs=1e-14)


def test_gelu_tanh_is_close_but_not_equal_to_the_exact_gelu() -> None:
    x = torch.linspace(-4, 4, 200)
    difference = float((ops.gelu_tanh(x) - F.gelu(x)).abs().max())
    assert 1e-5 < difference < 1e-3


@pytest.mark.parametrize("kernel", ["ours", "by the error function", "PyTorch's"])
def test_every_kernel_computes_the_same_gelu(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "ours" and not ops.has_native_kernels():
        pytest.skip("no compiled kernels")
    ops.choose_native_kernels(kernel == "ours")
    monkeypatch.setattr(activation, "uses_gelu_by_erf", lambda: kernel == "by the error function")
    x = torch.linspace(-12, 12, 400, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ops.gelu, (x,))
    assert float((ops.gelu(x) - F.gelu(x)).detach().abs().max()) <= 1e-14
    for dtype in (torch.float32, *SIXTEEN_BITS):
        points = torch.linspace(-5, 5, 401).to(dtype)
        results = []
        for function, kind in ((ops.gelu, dtype), (F.gelu, torch.float64)):
            leaf = points.to(kind, copy=True).requires_grad_()
            y = function(leaf)
            y.sum().backward()
            assert leaf.grad is not None
            results.append((y.detach().double(), leaf.grad.double()))
        for actual, expected in zip(*results):
            # a result computed in float32 may lose that type's last digits of 1 + erf(x), and no more
            tolerance = 2 * torch.finfo(dtype).eps * expected.abs() + 8 * torch.finfo(torch.float32).eps
            assert bool(((actual - expected).abs() <= tolerance).all()), dtype


def test_swiglu_and_gradient_follow_the_definition() -> None:
    x = (3 * random(7, 16)).double().requires_grad_()
    assert torch.autograd.gradcheck(ops.swiglu, (x,))
    gate, gated = x.chunk(2, -1)
    assert float((ops.swiglu(x) - gate / (1 + torch.exp(-gate)) * gated).detach().abs().max()) <= 1e-14


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_swiglu_in_sixteen_bits_is_rounded_once(dtype: torch.dtype) -> None:
    x = (3 * random(400, 16)).to(dtype).requires_grad_()
    y = ops.swiglu(x)
    y.sum().backward()
    exact = x.detach().double().requires_grad_()
    expected = ops.swiglu(exact)
    expected.sum().backward()
    for ours, wide in ((y, expected), (x.grad, exact.grad)):
        assert ours is not None and wide is not None and ours.dtype == dtype
        assert (
            float(((ours.detach().double() - wide.detach()).abs() - torch.finfo(dtype).eps * wide.detach().abs()).max())
            <= 1e-6
        )
