"""A GPT small enough to be trained in every layout in a second, with every feature on that a layout could break."""

from __future__ import annotations

from typing import Sequence

from fugaku_gpt.config import RunConfig, load_run_config
from tests.support.text import VOCABULARY

SETTINGS = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.seq_len=24",
    f"model.vocab_size={VOCABULARY}",
    "model.vocab_multiple=24",  # 264 rows for tp=1, 288 for 2 and 4: padding differs from layout to layout
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "model.embedding_layernorm=true",
    "training.global_batch=8",
    "training.micro_batch=1",
    "training.lr=1e-3",  # AdamW turns the rounding of near-zero gradients into steps of this size
    "training.clip_grad=0.5",  # below the first norms: clipping takes place
    "training.bucket_mib=0.01",  # several buckets, the last one short
    "training.eval_batches=1",
)


def tiny_config(*overrides: str) -> RunConfig:
    """The tiny run with ``key=value`` overrides."""
    settings: Sequence[str] = (*SETTINGS, *overrides)
    return load_run_config(overrides=settings)
