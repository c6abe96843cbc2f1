"""The learning rate as a function of the iteration."""

from __future__ import annotations

import math

from fugaku_gpt.config import TrainingConfig


def learning_rate(training: TrainingConfig, iteration: int) -> float:
    """Learning rate of an iteration, counted from 0.

    First a linear warm-up to ``lr`` (Goyal et al. 2017, section 2.2), then, up to ``decay_length`` iterations in all:

    * ``cosine``: Loshchilov and Hutter 2017, "SGDR", eq. 5, one period. Its last iteration, one short of the period,
      has ``min_lr`` too.
    * ``linear``: a straight line.
    * ``constant``: ``lr`` for ever.
    * ``wsd``: warm-up, stable, decay (Hu et al. 2024, "MiniCPM", section 4.2): ``lr``, and a straight line in the last
      ``decay_fraction`` of the schedule (Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed
      training durations", section 3).

    All but ``constant`` end at ``min_lr`` in iteration ``decay_length`` - 1, and stay there. A step that was left out
    has used up its iteration, so that this holds in any run.
    """
    warmup, end = training.warmup_iterations, training.decay_length
    if iteration < warmup:
        return training.lr * (iteration + 1) / warmup
    if training.lr_schedule == "constant":
        return training.lr
    if iteration >= max(1, end - 1):
        return training.min_lr
    if training.lr_schedule == "cosine":
        progress = (iteration - warmup) / max(1, end - warmup)
        return training.min_lr + 0.5 * (training.lr - training.min_lr) * (1.0 + math.cos(math.pi * progress))
    longest = max(1, end - 1 - warmup)  # iterations after the one that has all of lr
    decaying = min(longest, max(1, round(training.decay_fraction * end))) if training.lr_schedule == "wsd" else longest
    return training.min_lr + (training.lr - training.min_lr) * min(1.0, (max(1, end - 1) - iteration) / decaying)
