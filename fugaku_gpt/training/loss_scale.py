"""Dynamic loss scaling, which keeps small float16 gradients from becoming zero (Micikevicius et al. 2018, "Mixed
Precision Training", section 3.2): the scale is kept as large as gradients allow."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping

from fugaku_gpt.config import TrainingConfig


class LossScale:
    """The loss scale of a float16 run; for other types it is always 1.

    Attributes:
        value: factor of a micro-batch's mean loss.
        since_overflow: iterations since the last overflow, or since the scale last doubled.
        overflows: number of iterations so far whose gradients were too large for the scale.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self.is_active = training.dtype == "float16"
        self.value = training.loss_scale if self.is_active else 1.0
        self.since_overflow = 0
        self.overflows = 0

    def state(self) -> Dict[str, Any]:
        """Return everything that changes, for JSON; empty if the scale is always 1."""
        if not self.is_active:
            return {}
        return {"value": self.value, "since_overflow": self.since_overflow, "overflows": self.overflows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned; start anew if it comes from a run of another type."""
        if self.is_active and state:
            self.value = float(state["value"])
            self.since_overflow, self.overflows = int(state["since_overflow"]), int(state["overflows"])

    def gradient_scale(self, tokens: int) -> float:
        """Return the factor of each token's loss in a micro-batch of ``tokens`` tokens."""
        return self.value / tokens if self.is_active else 1.0

    def is_overflow(self, loss: float, bad_ranks: int) -> bool:
        """True if the step is to be skipped and the scale lowered: some rank has seen a gradient that is not finite,
        the loss itself is finite, and the scale is not at its minimum yet."""
        can_be_lowered = self.is_active and self.value > self._training.loss_scale_min
        return can_be_lowered and math.isfinite(loss) and bad_ranks > 0

    def update(self, overflow: bool) -> None:
        """Adapt the scale; called after each iteration, with the same argument on every rank."""
        if not self.is_active:
            return
        if overflow:
            self.value = max(self.value / 2.0, self._training.loss_scale_min)
            self.since_overflow = 0
            self.overflows += 1
            return
        self.since_overflow += 1
        if self.since_overflow >= self._training.loss_scale_window:  # a resumed run may have a shorter one
            self.value *= 2.0
            self.since_overflow = 0
