"""The number of parameters of a model, and the name of its size in tables."""

from __future__ import annotations

from fugaku_gpt.config.schema import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Number of trained parameters with the unpadded vocabulary; tied output weights are counted once."""
    h, f = model.hidden, model.ffn_size
    attention = 3 * h * h + 3 * h + h * h + h
    mlp = h * f + f + f * h + h
    layer_norms = 2 * 2 * h
    outside = model.vocab_size * h + model.seq_len * h + 2 * h + (2 * h if model.embedding_layernorm else 0)
    return model.layers * (attention + mlp + layer_norms) + outside


def size_name(model: ModelConfig) -> str:
    """``model.name``, or the parameter count as tables write it: 1.1M, 124M, 1.3B, 13B."""
    if model.name:
        return model.name
    count = parameter_count(model)
    unit, letter = (1e9, "B") if count >= 999.5e6 else (1e6, "M")
    value = count / unit
    return f"{value:.1f}{letter}" if value < 9.95 else f"{value:.0f}{letter}"
