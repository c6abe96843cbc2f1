"""Small mistakes that a training may make without anyone noticing, which golden curves are there to detect."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Callable, Dict, Sequence, Tuple, Union

import pytest

from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.data import samples
from fugaku_gpt.model import attention, attention_core, dropout, init
from fugaku_gpt.parallel.buffers import ParamRange
from fugaku_gpt.training import trainer, workload
from fugaku_gpt.training.optimizer import BlockedAdamW

# a mistake in the code, or an equivalent setting
Mutation = Union[Callable[[pytest.MonkeyPatch], None], Tuple[str, ...]]


class PlainAdamW(BlockedAdamW):
    """Algorithm 2 of the paper over whole tensors, with mistakes.

    Args:
        eps: where it is added: ``outside`` the root (right), ``inside`` it, or to the root ``before`` its correction.
        decay: ``apart`` from the gradient (right), or as a part of the ``gradient``.
        ahead: steps by which the bias corrections are wrong.
    """

    def __init__(
        self,
        runs: Sequence[ParamRange],
        training: TrainingConfig,
        eps: str = "outside",
        decay: str = "apart",
        ahead: int = 0,
    ) -> None:
        super().__init__(runs, training)
        self._runs, self._eps, self._decay, self._ahead = runs, eps, decay, ahead

    def step(self, lr: float, divisor: float = 1.0) -> None:
        t = self._training
        self.steps += 1
        first_left, second_left = (1.0 - beta ** (self.steps + self._ahead) for beta in (t.beta1, t.beta2))
        for run, (m, v) in zip(self._runs, self.moments):
            g, x, weight_decay = run.gradients.div_(divisor), run.parameters, t.weight_decay if run.decays else 0.0
            if self._decay == "gradient":
                g = g + weight_decay * x
            else:
                x.mul_(1.0 - lr * weight_decay)
            m.mul_(t.beta1).add_(g, alpha=1.0 - t.beta1)
            v.mul_(t.beta2).addcmul_(g, g, value=1.0 - t.beta2)
            if self._eps == "inside":
                root = (v / second_left + t.eps).sqrt()
            elif self._eps == "before":
                root = (v.sqrt() + t.eps) / math.sqrt(second_left)
            else:
                root = (v / second_left).sqrt() + t.eps
            x.addcdiv_(m, root, value=-lr / first_left)


def adamw(**mistake: Any) -> Mutation:
    """Train with :class:`PlainAdamW`."""
    return lambda patch: patch.setattr(
        trainer, "build_optimizer", lambda runs, training: PlainAdamW(runs, training, **mistake)
    )


def _other_draws(patch: pytest.MonkeyPatch) -> None:
    real = init._draw_block
    patch.setattr(init, "_draw_block", lambda spec, seed, block: real(spec, seed + 1, block))


def _other_keys(patch: pytest.MonkeyPatch) -> None:
    real = dropout.keep_mask
    for module in (dropout, attention):
        patch.setattr(module, "keep_mask", lambda seed, site, *where: real(seed, site + 1, *where))


def _without_scale(patch: pytest.MonkeyPatch) -> None:
    for module in (dropout, attention):
        patch.setattr(module, "dropped_share", lambda probability: 0.0)


def _in_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(samples, "permuted_index", lambda key, size, index: index)


def _without_first_sample(patch: pytest.MonkeyPatch) -> None:
    real = workload.first_sample
    patch.setattr(workload, "first_sample", lambda *where: real(*where) + 1)


def _next_learning_rate(patch: pytest.MonkeyPatch) -> None:
    real = trainer.learning_rate
    patch.setattr(trainer, "learning_rate", lambda training, iteration: real(training, iteration + 1))


def _other_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_core, "math", SimpleNamespace(**{**vars(math), "sqrt": lambda x: x**0.51}))


NONE: Mutation = adamw()  # the optimizer of the mistakes, without a mistake
LARGE: Dict[str, Mutation] = {
    "weights from another seed": _other_draws,
    "samples in another order": _in_order,
    "samples from the second on": _without_first_sample,
    "other keys of dropout": _other_keys,
    "the next iteration's learning rate": _next_learning_rate,
    "moments corrected for a step more": adamw(ahead=1),
}
SMALL: Dict[str, Mutation] = {
    "epsilon inside the root": adamw(eps="inside"),
    "epsilon before the correction": adamw(eps="before"),
    "weight decay in the gradient": adamw(decay="gradient"),
    "a beta2 of 0.999": ("training.beta2=0.999",),
    "no clipping": ("training.clip_grad=0",),
    "dropout that does not scale": _without_scale,
    "a LayerNorm with another epsilon": ("model.layernorm_eps=1e-6",),
}
# by the case that must detect them; 16 bits do not detect small ones
MUTATIONS: Dict[str, Dict[str, Mutation]] = {
    "float64": {  # float32 rounds more than these change: attention is nearly even, and GELU nearly straight at first
        **LARGE,
        **SMALL,
        "scores of attention divided by more": _other_scores,
        "the other GELU": ("model.gelu=tanh",),
    },
    "plain": {
        "the other GELU": ("model.gelu=erf",),
        "clipping": ("training.clip_grad=0.5",),
        "a cosine of learning rates": ("training.lr_schedule=cosine",),
    },
    "ramps": {
        "samples that are not left out": ("training.skip_samples=[]",),
        "a batch that does not grow": tuple(f"training.ramp_{key}=null" for key in ("start", "increment", "samples")),
        "sequences that do not grow": tuple(
            f"training.seq_ramp_{key}=null" for key in ("start", "increment", "iterations")
        ),
    },
    "llama-float64": {
        "other wavelengths of rotary positions": ("model.rope_theta=9000",),
        "an RMSNorm with another epsilon": ("model.layernorm_eps=1e-6",),
    },
    "float32": {**LARGE, **SMALL},
    "bfloat16": LARGE,
    "llama-bfloat16": LARGE,
    "float16": {**LARGE, "a scale that grows sooner": ("training.loss_scale_window=1",)},
}
