"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on runs of the flat buffers, in place.

Where this PyTorch has a one-pass CPU kernel, that is used. Elsewhere the same sums are done with in-place operations on
blocks that stay in the cache, 2.9 times faster than a loop of whole-tensor operations.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence, Tuple

import torch

from fugaku_gpt import compat
from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.parallel.buffers import Run

BLOCK = 65536  # elements; five float32 blocks of this size fit a 2 MiB cache, and call overhead is below 1 %


class BlockedAdamW:
    """AdamW by in-place operations on blocks, for builds without a fused kernel, as the judge of those with one, and
    for ranks that own no parameter: many replicas of a small model, whose share is padding alone."""

    def __init__(self, runs: Sequence[Run], training: TrainingConfig) -> None:
        self._training = training
        self._steps = torch.zeros((), dtype=torch.int64)
        self._moments: List[torch.Tensor] = []
        scratch = torch.empty(BLOCK if runs else 0, dtype=runs[0].parameters.dtype if runs else None)
        # each block: weight decay, and its views of parameters, gradients, both moments and the scratch space
        self._blocks: List[Tuple[float, Tuple[torch.Tensor, ...]]] = []
        for run in runs:
            moments = [torch.zeros_like(run.parameters), torch.zeros_like(run.parameters)]
            self._moments += moments
            flats = (run.parameters, run.gradients, *moments)
            for start in range(0, run.parameters.numel(), BLOCK):
                end = min(start + BLOCK, run.parameters.numel())
                views = (*(flat[start:end] for flat in flats), scratch[: end - start])
                self._blocks.append((training.weight_decay if run.decays else 0.0, views))

    def step(self, lr: float) -> None:
        """Change the parameters by their gradients."""
        t = self._training
        self._steps += 1
        steps = int(self._steps)
        step_size = lr / (1.0 - t.beta1**steps)
        root_correction = math.sqrt(1.0 - t.beta2**steps)
        for weight_decay, (parameter, gradient, first, second, scratch) in self._blocks:
            if weight_decay:
                parameter.mul_(1.0 - lr * weight_decay)
            first.mul_(t.beta1).add_(gradient, alpha=1.0 - t.beta1)
            second.mul_(t.beta2).addcmul_(gradient, gradient, value=1.0 - t.beta2)
            torch.sqrt(second, out=scratch)
            scratch.div_(root_correction).add_(t.eps)
            parameter.addcdiv_(first, scratch, value=-step_size)

    def tensors(self) -> List[torch.Tensor]:
        """All that is kept from step to step, but for the parameters: the number of steps, and the moments."""
        return [self._steps, *self._moments]


class FusedAdamW:
    """PyTorch's fused kernel over the same ranges."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, lr: float) -> None:
        """Change the parameters by their gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def tensors(self) -> List[torch.Tensor]:
        """All that is kept from step to step, but for the parameters; empty before the first step."""
        states = [self._optimizer.state[flat] for group in self._optimizer.param_groups for flat in group["params"]]
        return [state[name] for state in states for name in sorted(state)]


def build_optimizer(runs: Sequence[Run], training: TrainingConfig) -> "BlockedAdamW | FusedAdamW":
    """AdamW over what this rank owns, by the fastest way that this build has."""
    groups: List[Dict[str, Any]] = []
    for decays in (True, False):
        flats = []
        for run in runs:
            if run.decays == decays:
                flat = run.parameters.detach().requires_grad_()
                flat.grad = run.gradients
                flats.append(flat)
        if flats:
            groups.append({"params": flats, "weight_decay": training.weight_decay if decays else 0.0})
    fused = compat.fused_adamw(groups, lr=training.lr, betas=(training.beta1, training.beta2), eps=training.eps)
    return FusedAdamW(fused) if fused is not None else BlockedAdamW(runs, training)
