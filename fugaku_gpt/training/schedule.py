"""The learning rate as a function of the iteration."""

from __future__ import annotations

import math

from fugaku_gpt.config import TrainingConfig


def learning_rate(training: TrainingConfig, iteration: int) -> float:
    """Learning rate of an iteration, counted from 0: linear warm-up to ``lr``, cosine to ``min_lr``, then ``min_lr``.

    Source: Loshchilov and Hutter 2017, "SGDR", eq. 5, one period, after the warm-up of Goyal et al. 2017.
    """
    warmup, end = training.warmup_iterations, training.decay_length
    if iteration < warmup:
        return training.lr * (iteration + 1) / warmup
    if iteration >= end:
        return training.min_lr
    progress = (iteration - warmup) / max(1, end - warmup)
    return training.min_lr + 0.5 * (training.lr - training.min_lr) * (1.0 + math.cos(math.pi * progress))
