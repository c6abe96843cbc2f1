"""AdamW as one kernel, where this build has one for the CPU."""

from __future__ import annotations

import functools
from typing import Callable, Optional

import torch

from fugaku_gpt.compat.probes import TOLERANCE_ROUNDINGS, probe_input


@functools.lru_cache(maxsize=None)
def fused_adamw(dtype: torch.dtype) -> Optional[Callable[..., None]]:
    """PyTorch's one-pass CPU kernel of AdamW, or None where this build has none for a type.

    Its arguments: lists of parameters, gradients, first moments, second moments, none of a fifth kind, and numbers of
    steps, then ``lr``, ``beta1``, ``beta2``, ``weight_decay``, ``eps``, ``amsgrad``, ``maximize``. The kernel itself is
    called: ``torch.optim.AdamW`` would import PyTorch's compiler first, which took half of the time until a small
    model's first step.
    """
    kernel: Optional[Callable[..., None]] = getattr(torch, "_fused_adamw_", None)
    return kernel if kernel is not None and _steps_as_adamw(kernel, dtype) else None


@functools.lru_cache(maxsize=None)
def has_gradient_scale(dtype: torch.dtype) -> bool:
    """Whether the fused kernel divides gradients of a type by ``grad_scale``, a float32 scalar, to the precision of
    that type, and leaves the quotients in their place."""
    kernel = fused_adamw(dtype)
    return kernel is not None and _steps_as_adamw(kernel, dtype, divisor=3.3)


def _steps_as_adamw(kernel: Callable[..., None], dtype: torch.dtype, divisor: float = 1.0) -> bool:
    """Whether a kernel takes AdamW's third step, and leaves the gradients as they were, or divided."""
    lr, beta1, beta2, decay, eps, steps = 0.1, 0.9, 0.95, 0.2, 0.05, 3
    # as many elements as no vector has: the last of them are not stepped by the loop that steps the others
    weight, gradient, first, second = (shift + probe_input(67).to(dtype) for shift in (1.0, 2.0, 0.5, 2.0))
    w, g, m, v = (x.double() for x in (weight, gradient, first, second))
    g = g / divisor
    m, v = beta1 * m + (1.0 - beta1) * g, beta2 * v + (1.0 - beta2) * g * g
    root = (v / (1.0 - beta2**steps)).sqrt()
    w = w * (1.0 - lr * decay) - lr / (1.0 - beta1**steps) * m / (root + eps)
    try:
        kernel(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(float(steps))],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            **({} if divisor == 1.0 else {"grad_scale": torch.tensor(divisor)}),
        )
    except (RuntimeError, TypeError):  # not for the CPU, not for this type, or with other arguments
        return False
    tolerance = 2.0 * TOLERANCE_ROUNDINGS * torch.finfo(dtype).eps
    return all(
        float((x.double() - y).abs().max()) <= tolerance * float(y.abs().max())
        for x, y in ((weight, w), (gradient, g), (first, m), (second, v))
    )
