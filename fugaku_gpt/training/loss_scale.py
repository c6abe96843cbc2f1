"""The factor that keeps small float16 gradients from becoming zero (Micikevicius et al. 2018, "Mixed Precision
Training", section 3.2), found while training: as large as gradients allow."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping

from fugaku_gpt.config import TrainingConfig


class LossScale:
    """Of float16; of other types it is 1 and stays so.

    Attributes:
        value: what a micro-batch's mean loss is multiplied by.
        since_overflow: iterations since the last one, or since the scale doubled.
        overflows: iterations so far whose gradients were too large for it.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self.active = training.dtype == "float16"
        self.value = training.loss_scale if self.active else 1.0
        self.since_overflow = 0
        self.overflows = 0

    def state(self) -> Dict[str, Any]:
        """All that changes, for JSON; empty where the scale stays 1."""
        if not self.active:
            return {}
        return {"value": self.value, "since_overflow": self.since_overflow, "overflows": self.overflows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; begin anew where that was a run of another type."""
        if self.active and state:
            self.value = float(state["value"])
            self.since_overflow, self.overflows = int(state["since_overflow"]), int(state["overflows"])

    def gradient_scale(self, tokens: int) -> float:
        """What a token's loss is multiplied by in a micro-batch of so many tokens."""
        return self.value / tokens if self.active else 1.0

    def is_overflow(self, loss: float, bad_ranks: int) -> bool:
        """Whether an iteration is to be left out and the scale lowered: some rank has seen a gradient that is not
        finite, the loss itself is finite, and the scale is not the smallest yet."""
        lower = self.active and self.value > self._training.loss_scale_min
        return lower and math.isfinite(loss) and bad_ranks > 0

    def update(self, overflow: bool) -> None:
        """After each iteration, on every rank alike."""
        if not self.active:
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
