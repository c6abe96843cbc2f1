"""Small models of every kind that the decoder can be."""

from __future__ import annotations

from typing import Dict, Sequence

from fugaku_gpt.config import ModelConfig, load_run_config

_SMALL = (
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.seq_len=24", "model.vocab_size=101",
    "model.vocab_multiple=24",
)  # fmt: skip
_LLAMA = ("model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rope", "model.biases=none", "model.kv_heads=2")
MODELS: Dict[str, Sequence[str]] = {
    "gpt2": (),
    "bloom-like": ("model.embedding_layernorm=true",),
    "llama": _LLAMA,
    "qwen3-like": (*_LLAMA, "model.qk_norm=true", "model.head_dim=10", "model.tied_embeddings=false"),
}


def model_of_kind(kind: str, *overrides: str) -> ModelConfig:
    """Return the small model of a kind, with ``key=value`` overrides."""
    return load_run_config(overrides=[*_SMALL, *MODELS[kind], *overrides]).model
