"""Makes trainers of the tiny run on this rank alone."""

from __future__ import annotations

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


def tiny_trainer(*overrides: str) -> Trainer:
    """A trainer with ``key=value`` overrides, which validates on what it trains on."""
    config = tiny_config(*overrides)
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, ProcessGrid.alone(), samples, samples)
