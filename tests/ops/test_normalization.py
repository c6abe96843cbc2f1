"""Tests of RMSNorm; LayerNorm is tested with the kernels."""

from __future__ import annotations

import pytest
import torch

from fugaku_gpt import ops
from tests.ops.inputs import SIXTEEN_BITS, random


def by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def test_rms_norm_and_gradient_follow_the_definition() -> None:
    x, weight = (3 * random(5, 4, 24)).double().requires_grad_(), random(24).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: ops.rms_norm(x, weight, 1e-3), (x, weight))
    expected = by_definition(x, weight, 1e-3)
    assert float((ops.rms_norm(x, weight, 1e-3) - expected).detach().abs().max()) <= 1e-14


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_sixteen_bits_are_computed_in_float32(dtype: torch.dtype) -> None:
    x, y_grad, weight = (random(*shape).to(dtype) for shape in ((2000, 24), (2000, 24, 1), (24,)))
    y_grad = y_grad.view(2000, 24)
    x.requires_grad_()
    wide_weight = weight.float().requires_grad_()  # as layers pass it, so that its gradient is not rounded
    y = ops.rms_norm(x, wide_weight, 1e-5)
    y.backward(y_grad)
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    exact = by_definition(exact_x, exact_weight, 1e-5)
    exact.backward(y_grad.double())
    rounding = torch.finfo(dtype).eps
    for ours, expected in ((y, exact), (x.grad, exact_x.grad)):
        assert ours is not None and expected is not None and ours.dtype == dtype
        difference = (ours.detach().double() - expected.detach()).abs()
        assert float(difference.max()) <= rounding * float(expected.detach().abs().max())
    assert wide_weight.grad is not None and exact_weight.grad is not None
    assert float((wide_weight.grad - exact_weight.grad).abs().max()) <= 1e-5 * float(exact_weight.grad.abs().max())
