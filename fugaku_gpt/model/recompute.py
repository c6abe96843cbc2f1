"""Activation recomputation: a forward pass saves only its inputs, and the backward pass computes it again (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost").

The second time gives the same result to the last bit: dropout is a function of what is dropped (``dropout.py``), and
the same kernels run on the same inputs. Collectives inside are called again, in the order of the backward pass, which
is the same on every rank of a tensor-parallel group.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from fugaku_gpt import compat


def recomputed(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return ``function(*inputs)``, saving only the inputs for the backward pass.

    Gradients of parameters that the function uses are added to their ``main_grad`` (``parallel/gradient_path.py``) or
    their ``.grad`` by the backward pass inside, each once, as without recomputation. That pass is only reached through
    the inputs: if none of them requires a gradient (a layer on its own), everything is saved as usual.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return function(*inputs)
    y: torch.Tensor = _Recomputed.apply(function, *inputs)
    return y


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)  # gradients are off in here: it leaves no graph

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        needs_grad = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(wants) for x, wants in zip(ctx.saved_tensors, needs_grad)]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        compat.backward(y, grad)
        return (None, *(x.grad for x in inputs))
