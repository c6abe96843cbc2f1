"""Which samples a replica reads: a pure function of the samples consumed, so any layout reads the same global batch."""

from __future__ import annotations

from fugaku_gpt.config.schema import RunConfig


def first_sample(config: RunConfig, consumed: int, micro_batch: int, dp_rank: int) -> int:
    """Number of the first of the ``training.micro_batch`` consecutive samples of one micro-batch of one replica.

    Args:
        consumed: samples that all earlier iterations have used.
        micro_batch: index within the iteration, from 0.
        dp_rank: the replica.
    """
    return consumed + (micro_batch * config.layout.dp + dp_rank) * config.training.micro_batch
