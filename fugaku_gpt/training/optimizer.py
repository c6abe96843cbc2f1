"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on runs of the flat buffers, in place.

Our own compiled kernel does all in one pass over memory; where it is not there, PyTorch's one-pass CPU kernel, if this
build has one. Elsewhere the same sums are done with in-place operations on
blocks that stay in the cache, 2.9 times faster than a loop of whole-tensor operations.
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
    """AdamW by in-place operations on blocks, for builds without a fused kernel, as the judge of those with one, and
    for ranks that own no parameter: many replicas of a small model, whose share is padding alone.

    Attributes:
        steps: done so far.
        moments: first and second moment of each run, in the order of the runs.
        rounds: a step of masters writes the parameters that are rounded from them.
    """

    rounds = False

    def __init__(self, runs: Sequence[ParamRange], training: TrainingConfig) -> None:
        self._training = training
        self.steps = 0
        self.moments: Moments = []
        scratch = torch.empty(BLOCK if runs else 0, dtype=runs[0].parameters.dtype if runs else None)
        # each block: weight decay, and its views of parameters, gradients, both moments and the scratch space
        self._blocks: List[Tuple[float, Tuple[torch.Tensor, ...]]] = []
        for run in runs:
            moments = (torch.zeros_like(run.parameters), torch.zeros_like(run.parameters))
            self.moments.append(moments)
            flats = (run.parameters, run.gradients, *moments)
            for start in range(0, run.parameters.numel(), BLOCK):
                end = min(start + BLOCK, run.parameters.numel())
                views = (*(flat[start:end] for flat in flats), scratch[: end - start])
                self._blocks.append((training.weight_decay if run.decays else 0.0, views))

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """Divide the gradients by ``divisor``, and change the parameters by them. What the gradients' memory holds
        afterwards nobody needs."""
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
    """PyTorch's fused kernel: one call for all runs with weight decay, one for those without. It divides the
    gradients in the same pass, where this build's can.

    Attributes:
        steps, moments, rounds: as of :class:`BlockedAdamW`.
    """

    rounds = False

    def __init__(self, runs: Sequence[ParamRange], training: TrainingConfig) -> None:
        """There is a kernel for the runs' type."""
        dtype = runs[0].parameters.dtype
        self._kernel, self._divides = compat.fused_adamw(dtype), compat.has_gradient_scale(dtype)
        self._training = training
        self.steps = 0
        self.moments: Moments = [(torch.zeros_like(run.parameters), torch.zeros_like(run.parameters)) for run in runs]
        # weight decay, and of the runs that have it: parameters, gradients, both moments
        self._groups: List[Tuple[float, List[List[torch.Tensor]]]] = []
        for decays in (True, False):
            alike = [
                [run.parameters, run.gradients, *moments]
                for run, moments in zip(runs, self.moments)
                if run.decays == decays
            ]
            if alike:
                self._groups.append((training.weight_decay if decays else 0.0, [list(kind) for kind in zip(*alike)]))

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """As of :class:`BlockedAdamW`."""
        t = self._training
        self.steps += 1
        steps = torch.tensor(float(self.steps))
        scale = torch.tensor(divisor) if self._divides else None  # by which the kernel divides gradients
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
    """Our own kernel: one call for each run, which rounds masters to bfloat16 in the same pass.

    Attributes:
        steps, moments, rounds: as of :class:`BlockedAdamW`.
    """

    def __init__(self, runs: Sequence[ParamRange], training: TrainingConfig) -> None:
        """The runs are float32."""
        self._runs, self._training = list(runs), training
        self.steps = 0
        self.moments: Moments = [(torch.zeros_like(run.parameters), torch.zeros_like(run.parameters)) for run in runs]
        self.rounds = all(run.rounded is not None and run.rounded.dtype == torch.bfloat16 for run in runs)

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """As of :class:`BlockedAdamW`."""
        t = self._training
        self.steps += 1
        root_correction = math.sqrt(1.0 - t.beta2**self.steps)
        for run, moments in zip(self._runs, self.moments):
            step = ops.AdamWStep(
                divisor=divisor,
                keeps=1.0 - lr * t.weight_decay if run.decays else 1.0,
                betas=(t.beta1, t.beta2),
                step_size=lr / (1.0 - t.beta1**self.steps) * root_correction,
                eps=t.eps * root_correction,
            )
            rounded = run.rounded if self.rounds else None
            ops.step_adamw(run.parameters, run.gradients, moments, rounded, step)


def build_optimizer(
    runs: Sequence[ParamRange], training: TrainingConfig
) -> "BlockedAdamW | FusedAdamW | CompiledAdamW":
    """AdamW over what this rank owns, by the fastest way that there is."""
    if runs and runs[0].parameters.dtype == torch.float32 and ops.uses_native_kernels():
        return CompiledAdamW(runs, training)
    fused = bool(runs) and compat.fused_adamw(runs[0].parameters.dtype) is not None
    return FusedAdamW(runs, training) if fused else BlockedAdamW(runs, training)
