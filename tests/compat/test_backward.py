"""Tests of the backward pass from a given gradient."""

from __future__ import annotations

import pytest
import torch

from fugaku_gpt import compat
from tests.ops.inputs import random


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_backward_pass_from_a_given_gradient_equals_pytorch_s(dtype: torch.dtype) -> None:
    if not compat.can_train(dtype):
        pytest.skip("this PyTorch cannot train in that type")
    gradient, gradients = random(3, 4).to(dtype), []
    for backward in (compat.backward, torch.Tensor.backward):
        x, y = (random(3, 4).to(dtype).requires_grad_() for _ in range(2))
        backward(x * y + x, gradient)
        gradients.append((x.grad, y.grad))
    for ours, expected in zip(*gradients):
        assert ours is not None and expected is not None and torch.equal(ours, expected)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):  # as in a function of autograd
        compat.backward(random(3), random(3))
    x = random(3).requires_grad_()
    compat.backward((2.0 * x).sum())
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
