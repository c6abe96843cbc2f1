"""Tests of softmax in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.ops import softmax
from tests.ops.inputs import random
from tests.ops.wrong import refuses


@pytest.mark.parametrize("own", [True, False], ids=["PyTorch's kernels", "by hand"])
def test_softmax_and_softmax_gradient_may_overwrite_their_inputs(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not own:
        monkeypatch.setattr(softmax, "_softmax_works_in_place", lambda dtype: False)
        monkeypatch.setattr(softmax, "_softmax_gradient", lambda dtype: None)
    x, grad = random(3, 5, 70), random(5, 3, 70).view(3, 5, 70)
    leaf = x.clone().requires_grad_()
    judge = torch.softmax(leaf, dim=-1)
    judge.backward(grad)
    result = ops.softmax_(x)
    assert torch.equal(result, judge)
    assert torch.allclose(ops.softmax_gradient_(grad.clone(), result), leaf.grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kernel", [None, refuses, lambda *_, **__: torch.zeros(())])
def test_softmax_kernels_that_are_missing_or_wrong_are_not_used(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_softmax", "_softmax_backward_data"):
        if kernel is None:
            monkeypatch.delattr(torch, name, raising=False)
        else:
            monkeypatch.setattr(torch, name, kernel, raising=False)
    for dtype in (torch.float32, torch.bfloat16):
        assert not softmax._softmax_works_in_place.__wrapped__(dtype)
        assert softmax._softmax_gradient.__wrapped__(dtype) is None
