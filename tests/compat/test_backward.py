"""A backward pass from a given gradient is PyTorch's."""

from __future__ import annotations

import pytest
import torch

from fugaku_gpt import compat
from tests.ops.inputs import random


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_backward_pass_from_a_given_gradient_is_pytorch_s(dtype: torch.dtype) -> None:
    if not compat.can_train(dtype):
        pytest.skip("this PyTorch cannot train in that type")
    gradient, found = random(3, 4).to(dtype), []
    for backward in (compat.backward, torch.Tensor.backward):
        x, y = (random(3, 4).to(dtype).requires_grad_() for _ in range(2))
        backward(x * y + x, gradient)
        found.append((x.grad, y.grad))
    for mine, judge in zip(*found):
        assert mine is not None and judge is not None and torch.equal(mine, judge)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):  # as in a function of autograd
        compat.backward(random(3), random(3))
    x = random(3).requires_grad_()
    compat.backward((2.0 * x).sum())
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
