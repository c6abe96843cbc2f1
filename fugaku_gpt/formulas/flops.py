"""Floating-point operations of one training iteration, by the two formulas that tables use.

Symbols: B global batch in sequences, s sequence length, l layers, h hidden, V padded vocabulary, or rows of the
output weights: of a grid classifier, s cells of a bucket's grids, padding included, and C padded classes.
Source of the notes' form: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", eq. 3, with the factor 4 (one more forward pass, for recompute) replaced by 3 if nothing is recomputed.
"""

from __future__ import annotations

from fugaku_gpt.config.schema import ModelConfig

# text of the formulas, which records store beside the figures
NOTES_FORMULA = "24 f B s l h^2 (1 + s/6h + V/16lh), f = 4 with recompute, else 3"
EXACT_FORMULA = "6 B s (l (4 h^2 + 2 h ffn) + V h + 2 s l h)"
# with q the width of all query heads, k that of all heads of keys, and m parts of the MLP: 2, or 3 with SwiGLU
EXACT_DECODER_FORMULA = "6 B s (l (2 h q + 2 h k + m h ffn) + V h + 2 s l q)"
EXACT_GRID_FORMULA = "6 B (s l (2 h q + 2 h k + m h ffn + 2 s q) + C h)"


def notes_flops(model: ModelConfig, global_batch: int, padded_vocab: int, recompute: bool = False) -> float:
    """FLOPs per iteration as the notes' tables count them: 24 f B s l h² (1 + s/6h + V/16lh), f = 4 with recompute,
    else 3.

    Without recompute this counts the logits 3/4 and so reads low (6.8 % on 124M); it is kept because years of tables
    use it. It is a GPT-2's: another model has the exact count.
    """
    if not _has_gpt2_products(model):
        return exact_flops(model, global_batch, padded_vocab)
    s, l, h = model.seq_len, model.layers, model.hidden  # noqa: E741  # the formula's own letters
    factor = 4 if recompute else 3
    return 24.0 * factor * global_batch * s * l * h * h * (1 + s / (6 * h) + padded_vocab / (16 * l * h))


def exact_flops(model: ModelConfig, global_batch: int, padded_vocab: int) -> float:
    """FLOPs per iteration of every matrix product, forward and backward, nothing recomputed.

    For an MLP of 4h this is 72 B s l h² (1 + s/6h + V/12lh). Attention is counted in full, causal or not, as is the
    custom; so is that of grids, whose cells do not see the padding, and that of documents that are apart.
    """
    s, l, h = model.seq_len, model.layers, model.hidden  # noqa: E741
    if model.is_grid_classifier:  # one row of logits for all cells of a grid
        return (
            6.0 * global_batch * (s * l * (float(model.layer_weights) + 2.0 * s * model.query_width) + padded_vocab * h)
        )
    weights = float(l * model.layer_weights + padded_vocab * h)
    attention = 2.0 * s * model.query_width * l  # scores and values, per token: 2 products of s * width multiply-adds
    return 3 * 2.0 * global_batch * s * (weights + attention)


def exact_formula(model: ModelConfig) -> str:
    """The text of the formula of :func:`exact_flops` for a model."""
    if model.is_grid_classifier:
        return EXACT_GRID_FORMULA
    return EXACT_FORMULA if _has_gpt2_products(model) else EXACT_DECODER_FORMULA


def notes_formula(model: ModelConfig) -> str:
    """The text of the formula of :func:`notes_flops` for a model."""
    return NOTES_FORMULA if _has_gpt2_products(model) else exact_formula(model)


def _has_gpt2_products(model: ModelConfig) -> bool:
    if model.is_grid_classifier:
        return False
    return model.qkv_width == 3 * model.hidden == 3 * model.query_width and model.mlp == "gelu"


def tflops_per_node(flops: float, seconds_per_iteration: float, nodes: int) -> float:
    """TFLOP/s of one node."""
    return flops / (seconds_per_iteration * nodes * 1e12)


def aggregate_petaflops(tflops: float, nodes: int, si: bool = False) -> float:
    """Estimated petaFLOP/s of all nodes: TFLOPs * nodes / 1024 as the notes have it, / 1000 with ``si``."""
    return tflops * nodes / (1000.0 if si else 1024.0)
