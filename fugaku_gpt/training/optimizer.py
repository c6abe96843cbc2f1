"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on ranges of the flat buffers, in place.

Our own compiled kernel takes one pass over memory. Without it PyTorch's fused CPU kernel is used, if this build has
one. Otherwise the update is computed with in-place operations on blocks that stay in the cache, which is 2.9 times
faster than a loop of whole-tensor operations.
"""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.parallel.buffers import ParamRange

BLOCK = 65536  # elements; five float32 blocks of this size fit a 2 MiB cache, and call overhead is below 1 %


Moments = List[Tuple[torch.Tensor, torch.Tensor]]


class BlockedAdamW:
    """AdamW by in-place operations on blocks: for builds without a fused kernel, as the reference for those with one,
    and for ranks that own no parameter (with many replicas of a small model, a rank's shard may be padding alone).

    Attributes:
        steps: number of steps done.
        moments: first and second moment of each parameter range.
        rounds_parameters: a step on master weights also writes the 16-bit parameters rounded from them.
    """

    rounds_parameters = False

    def __init__(self, param_ranges: Sequence[ParamRange], training: TrainingConfig) -> None:
        self._training = training
        self.steps = 0
        self.moments: Moments = []
        scratch = torch.empty(
            BLOCK if param_ranges else 0, dtype=param_ranges[0].parameters.dtype if param_ranges else None
        )
        # each block: weight decay, and its views of parameters, gradients, both moments and the scratch space
        self._blocks: List[Tuple[float, Tuple[torch.Tensor, ...]]] = []
        for param_range in param_ranges:
            moments = (torch.zeros_like(param_range.parameters), torch.zeros_like(param_range.parameters))
            self.moments.append(moments)
            flats = (param_range.parameters, param_range.gradients, *moments)
            for start in range(0, param_range.parameters.numel(), BLOCK):
                end = min(start + BLOCK, param_range.parameters.numel())
                views = (*(flat[start:end] for flat in flats), scratch[: end - start])
                self._blocks.append((training.weight_decay if param_range.decays else 0.0, views))

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """Divide the gradients by ``divisor`` and update the parameters. The gradients are undefined afterwards."""
        t = self._training
        self.steps += 1
        root_correction = math.sqrt(1.0 - t.beta2**self.steps)
        step_size = lr / (1.0 - t.beta1**self.steps) * root_correction
        eps = t.eps * root_correction  # m / (√v / c + eps) = c m / (√v + c eps): no pass that divides by c
        for weight_decay, (parameter, gradient, first, second, scratch) in self._blocks:
            if divisor != 1.0:
                gradient.mul_(1.0 / divisor)
            if weight_decay:
                parameter.mul_(1.0 - lr * weight_decay)
            first.mul_(t.beta1).add_(gradient, alpha=1.0 - t.beta1)
            second.mul_(t.beta2).addcmul_(gradient, gradient, value=1.0 - t.beta2)
            torch.sqrt(second, out=scratch)
            parameter.addcdiv_(first, scratch.add_(eps), value=-step_size)


class FusedAdamW:
    """AdamW by PyTorch's fused kernel: one call for all ranges with weight decay, one for those without. The kernel
    also divides the gradients, if this build's can.

    Attributes:
        steps, moments, rounds_parameters: see :class:`BlockedAdamW`.
    """

    rounds_parameters = False

    def __init__(self, param_ranges: Sequence[ParamRange], training: TrainingConfig) -> None:
        """Create the moments. This build must have a fused kernel for the parameters' type."""
        dtype = param_ranges[0].parameters.dtype
        self._kernel, self._supports_grad_scale = compat.fused_adamw(dtype), compat.has_gradient_scale(dtype)
        self._training = training
        self.steps = 0
        self.moments: Moments = [
            (torch.zeros_like(param_range.parameters), torch.zeros_like(param_range.parameters))
            for param_range in param_ranges
        ]
        # weight decay, and parameters, gradients and both moments of the ranges that have it
        self._groups: List[Tuple[float, List[List[torch.Tensor]]]] = []
        for decays in (True, False):
            same_decay = [
                [param_range.parameters, param_range.gradients, *moments]
                for param_range, moments in zip(param_ranges, self.moments)
                if param_range.decays == decays
            ]
            if same_decay:
                self._groups.append(
                    (training.weight_decay if decays else 0.0, [list(kind) for kind in zip(*same_decay)])
                )

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """Do what :meth:`BlockedAdamW.step` does."""
        t = self._training
        self.steps += 1
        steps = torch.tensor(float(self.steps))
        scale = torch.tensor(divisor) if self._supports_grad_scale else None  # by which the kernel divides gradients
        assert self._kernel is not None
        for weight_decay, (parameters, gradients, first, second) in self._groups:
            for gradient in gradients if scale is None and divisor != 1.0 else []:
                gradient.mul_(1.0 / divisor)
            self._kernel(
                parameters,
                gradients,
                first,
                second,
                [],
                [steps] * len(parameters),
                lr=lr,
                beta1=t.beta1,
                beta2=t.beta2,
                weight_decay=weight_decay,
                eps=t.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )


class CompiledAdamW:
    """AdamW by our own kernel: one call for each range, which also rounds master weights to bfloat16.

    Attributes:
        steps, moments, rounds_parameters: see :class:`BlockedAdamW`.
    """

    def __init__(self, param_ranges: Sequence[ParamRange], training: TrainingConfig) -> None:
        """Create the moments. The ranges must be float32."""
        self._param_ranges, self._training = list(param_ranges), training
        self.steps = 0
        self.moments: Moments = [
            (torch.zeros_like(param_range.parameters), torch.zeros_like(param_range.parameters))
            for param_range in param_ranges
        ]
        self.rounds_parameters = all(
            param_range.rounded is not None and param_range.rounded.dtype == torch.bfloat16
            for param_range in param_ranges
        )

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """Do what :meth:`BlockedAdamW.step` does."""
        t = self._training
        self.steps += 1
        root_correction = math.sqrt(1.0 - t.beta2**self.steps)
        for param_range, moments in zip(self._param_ranges, self.moments):
            step = ops.AdamWStep(
                divisor=divisor,
                keeps=1.0 - lr * t.weight_decay if param_range.decays else 1.0,
                betas=(t.beta1, t.beta2),
                step_size=lr / (1.0 - t.beta1**self.steps) * root_correction,
                eps=t.eps * root_correction,
            )
            rounded = param_range.rounded if self.rounds_parameters else None
            ops.step_adamw(param_range.parameters, param_range.gradients, moments, rounded, step)


def build_optimizer(
    param_ranges: Sequence[ParamRange], training: TrainingConfig
) -> "BlockedAdamW | FusedAdamW | CompiledAdamW":
    """Return AdamW over what this rank owns, with the fastest implementation available."""
    if param_ranges and param_ranges[0].parameters.dtype == torch.float32 and ops.uses_native_kernels():
        return CompiledAdamW(param_ranges, training)
    fused = bool(param_ranges) and compat.fused_adamw(param_ranges[0].parameters.dtype) is not None
    return FusedAdamW(param_ranges, training) if fused else BlockedAdamW(param_ranges, training)
