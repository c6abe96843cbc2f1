"""Runs operations in float32 on tensors of a 16-bit type."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from fugaku_gpt.compat.backward import backward
from fugaku_gpt.compat.probes import WIDE_DTYPES, has_kernel


def or_in_float32(operation: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a function of tensors: it runs in their own type if ``operation`` has a kernel for it, otherwise in float32
    with casts."""

    def wrapper(x: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        dtype = x.dtype
        if dtype in WIDE_DTYPES or has_kernel(operation, dtype):
            return function(x, *more, **options)
        wide = [argument.float() if isinstance(argument, torch.Tensor) else argument for argument in more]
        return function(x.float(), *wide, **options).to(dtype)

    return wrapper


class InFloat32(torch.autograd.Function):
    """A cheap operation in float32 that saves its inputs in their own type. The backward pass recomputes it, and gives
    each input a gradient of its type."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*(x.float() for x in inputs)).to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        inputs = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        backward(y, grad.float())
        input_grads = zip((x.grad for x in inputs), ctx.saved_tensors)
        return (None, *(None if grad_x is None else grad_x.to(saved.dtype) for grad_x, saved in input_grads))
