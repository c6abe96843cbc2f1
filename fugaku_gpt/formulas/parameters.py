"""The number of parameters of a model, the name of its size in tables, and that of a run."""

from __future__ import annotations

from fugaku_gpt.config.schema import ModelConfig, RunConfig


def parameter_count(model: ModelConfig) -> int:
    """Number of trained parameters with the unpadded vocabulary; tied output weights are counted once."""
    h = model.hidden
    norm = 2 * h if model.norm == "layernorm" else h
    biases = model.qkv_width if model.biases != "none" else 0
    biases += h + model.up_width + h if model.biases == "all" else 0
    head_norms = 2 * model.head_size if model.qk_norm else 0
    embeddings = (model.vocab_size + (0 if model.tied_embeddings else model.outputs)) * h
    positions = (2 * model.grid_side if model.is_grid_classifier else model.seq_len) * h
    positions = positions if model.positions == "learned" else 0
    outside = embeddings + positions + norm + (norm if model.embedding_layernorm else 0)
    return model.layers * (model.layer_weights + biases + head_norms + 2 * norm) + outside


def size_name(model: ModelConfig) -> str:
    """``model.name``, or the parameter count as tables write it: 1.1M, 124M, 1.3B, 13B."""
    if model.name:
        return model.name
    count = parameter_count(model)
    unit, letter = (1e9, "B") if count >= 999.5e6 else (1e6, "M")
    value = count / unit
    return f"{value:.1f}{letter}" if value < 9.95 else f"{value:.0f}{letter}"


def run_name(config: RunConfig) -> str:
    """The name of a run where none is given: that of its job, or its size and layout."""
    layout = config.layout
    return config.job.name or f"{size_name(config.model)}-dp{layout.dp}-tp{layout.tp}-pp{layout.pp}"
