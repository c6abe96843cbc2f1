"""Tests that a fused AdamW is used only if it does what AdamW does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.compat import adamw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_optimizer_takes_the_first_step_of_adam(dtype: torch.dtype) -> None:
    kernel = compat.fused_adamw(dtype)
    if kernel is None:
        assert not compat.has_gradient_scale(dtype)
        pytest.skip("this PyTorch has no fused AdamW for the CPU")
    weights, gradients, first, second = ([torch.full((5,), value, dtype=dtype)] for value in (1.0, 3.0, 0.0, 0.0))
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    kernel(weights, gradients, first, second, [], [torch.tensor(1.0)], **rates, amsgrad=False, maximize=False)
    assert weights[0].tolist() == pytest.approx([0.99] * 5, rel=1e-6)  # the learning rate, by the gradient's sign
    assert first[0].tolist() == pytest.approx([0.3] * 5) and second[0].tolist() == pytest.approx([0.09] * 5)


def _other_signature(*_: Any, learning_rate: float) -> None:
    raise AssertionError("is not called")


def _does_nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.parametrize("kernel", [None, _other_signature, _does_nothing])
def test_a_kernel_that_is_missing_or_wrong_is_not_used(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_adamw_", kernel, raising=False)
    assert compat.fused_adamw.__wrapped__(torch.float32) is None


def _adamw(
    weights: Any, gradients: Any, firsts: Any, seconds: Any, _: Any, steps: Any, wrong: str = "", **rates: Any
) -> None:
    """The algorithm, except for the step that ``wrong`` names."""
    (w,), (g,), (m,), (v,) = weights, gradients, firsts, seconds
    divisor, t = rates.get("grad_scale", torch.ones(())), float(steps[0])
    quotient = g / divisor
    g.copy_(g if wrong == "leaves gradients" else quotient)
    m.mul_(rates["beta1"]).add_((1.0 - rates["beta1"]) * quotient)
    v.mul_(rates["beta2"]).add_((1.0 - rates["beta2"]) * quotient**2)
    if wrong != "no decay":
        w.mul_(1.0 - rates["lr"] * rates["weight_decay"])
    root = (v / (1.0 - rates["beta2"] ** t)).sqrt() + (0.0 if wrong == "no eps" else rates["eps"])
    step = rates["lr"] / (1.0 - rates["beta1"] ** t) * m / root
    w.sub_(torch.cat((step[:64], 0.0 * step[64:])) if wrong == "no tail" else step)


@pytest.mark.parametrize("wrong", ["", "no decay", "no eps", "no tail", "leaves gradients"])
def test_each_step_of_the_algorithm_is_checked_in_a_kernel(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = functools.partial(_adamw, wrong=wrong)
    for dtype in (torch.float32, torch.float64):
        assert adamw._steps_as_adamw(kernel, dtype) == (wrong in ("", "leaves gradients"))
    assert adamw._steps_as_adamw(kernel, torch.float32, divisor=3.3) == (wrong == "")
