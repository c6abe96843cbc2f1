"""Attention's softmax, in place where this build supports it, and the type in which attention is computed."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch

from fugaku_gpt.compat.probes import TOLERANCE_ROUNDINGS, has_kernel, probe_input


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which attention is computed: the given one, or float32 if one of its operations has no good
    kernel."""
    return dtype if all(has_kernel(name, dtype) for name in ("bmm", "baddbmm", "softmax")) else torch.float32


def softmax_(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension; it may overwrite ``x``."""
    if _softmax_works_in_place(x.dtype):
        return torch._softmax(x, -1, False, out=x)
    return torch.softmax(x, dim=-1)


def softmax_gradient_(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The gradient of a softmax's input from that of its result; it may overwrite ``grad``."""
    kernel = _softmax_gradient(result.dtype)
    if kernel is not None:
        return kernel(grad, result)
    return grad.sub_((grad * result).sum(-1, keepdim=True)).mul_(result)


_MISSING = (AttributeError, RuntimeError, TypeError)  # no such function, not for this type or device, other arguments


@functools.lru_cache(maxsize=None)
def _softmax_works_in_place(dtype: torch.dtype) -> bool:
    x = probe_input(2, 3, 200).to(dtype)
    try:
        expected = torch.softmax(x, dim=-1)
        return torch.equal(torch._softmax(x, -1, False, out=x), expected) and torch.equal(x, expected)
    except _MISSING:
        return False


@functools.lru_cache(maxsize=None)
def _softmax_gradient(dtype: torch.dtype) -> Optional[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """PyTorch's own kernel, by the arguments that this build takes; None where it takes none of these."""
    backward: Any = getattr(torch, "_softmax_backward_data", None)

    def in_place(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        input_grad: torch.Tensor = backward(grad, result, -1, result.dtype, grad_input=grad)
        return input_grad

    def with_input(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        input_grad: torch.Tensor = backward(
            grad, result, -1, result
        )  # the last argument is the input, of which only the type matters
        return input_grad

    for function in (in_place, with_input):
        result, grad = torch.softmax(probe_input(2, 3, 200), dim=-1).to(dtype), probe_input(2, 3, 200).cos().to(dtype)
        wide, wide_grad = result.double(), grad.double()
        expected = wide * (wide_grad - (wide_grad * wide).sum(-1, keepdim=True))
        tolerance = TOLERANCE_ROUNDINGS * torch.finfo(dtype).eps * float(expected.abs().max())
        try:
            if float((function(grad, result).double() - expected).abs().max()) <= tolerance:
                return function
        except _MISSING:
            continue
    return None
