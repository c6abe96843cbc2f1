"""Runs a backward pass from a given gradient."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch


def backward(y: torch.Tensor, gradient: Optional[torch.Tensor] = None) -> None:
    """Run the backward pass from ``y`` on, whose gradient is ``gradient``, [of y's shape]; default: 1, of a scalar.

    PyTorch's own way of passing a gradient compares the two shapes by its compiler's symbolic shapes; importing these,
    and sympy with them, costs each rank a third of a second and some tens of MiB.

    Raises:
        RuntimeError: ``y`` needs no gradient.
    """
    with torch.enable_grad():
        start = y if gradient is None else _GivenGradient.apply(y, gradient)
    start.backward()


class _GivenGradient(torch.autograd.Function):
    """A scalar whose gradient by ``y`` is the one given."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient  # the caller's, who holds it anyway: nothing that is kept for the backward pass
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, unit_grad: torch.Tensor) -> Tuple[torch.Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None
