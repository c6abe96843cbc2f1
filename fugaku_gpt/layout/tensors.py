"""The tensors of a model by name, and which slice of each a tensor-parallel rank holds.

The model builds its parameters from this table; initial values, gradient norms and checkpoints go by it, so
they cannot disagree about what a name means. Names follow the module tree of ``model/gpt.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Tuple

from fugaku_gpt.config.schema import ModelConfig

TOKEN_EMBEDDING = "token_embedding.weight"
OUTPUT_WEIGHTS = "output.weight"  # where they are not the token embedding


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor of the model.

    Attributes:
        name: as in ``named_parameters()``.
        shape: of the whole tensor.
        tp_dim: dimension that is cut over the tensor-parallel ranks; None where every rank holds the whole tensor.
        copies: neighbouring tensor-parallel ranks that hold the same slice, each with the gradient of its own query
            heads; 1 where every rank has a slice of its own.
        init: ``normal``, ``zeros`` or ``ones``.
        std: standard deviation where init is normal.
        rows: rows of dimension 0 that are ever used; the rest is padding of the vocabulary, or of the classes, and
            stays zero.
        is_tied: the first and the last pipeline stage hold it both.
        is_partial: every tensor-parallel rank holds the whole tensor, and the gradient of its own heads.
    """

    name: str
    shape: Tuple[int, ...]
    tp_dim: Optional[int] = None
    copies: int = 1
    init: str = "zeros"
    std: float = 0.0
    rows: Optional[int] = None
    is_tied: bool = False
    is_partial: bool = False

    @property
    def decays(self) -> bool:
        """Whether AdamW's weight decay applies: to matrices, not to biases and norms."""
        return self.init == "normal"

    def slice_of(self, tp_rank: int, tp: int) -> Tuple[slice, ...]:
        """The part of the whole tensor that one tensor-parallel rank holds."""
        full_slices = tuple(slice(0, size) for size in self.shape)
        if self.tp_dim is None:
            return full_slices
        width = self.local_shape(tp)[self.tp_dim]
        first = tp_rank // self.copies * width
        local = slice(first, first + width)
        return (*full_slices[: self.tp_dim], local, *full_slices[self.tp_dim + 1 :])

    def local_shape(self, tp: int) -> Tuple[int, ...]:
        """Shape of one rank's part."""
        slices = tp // self.copies
        return tuple(size // slices if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def is_first_copy(self, tp_rank: int) -> bool:
        """Whether a tensor-parallel rank is the first of those that hold the same part: the one that counts it in
        norms, and writes it to checkpoints."""
        return tp_rank == 0 if self.tp_dim is None else tp_rank % self.copies == 0


def model_tensors(model: ModelConfig, tp: int) -> List[TensorSpec]:
    """Every tensor of the model, in order of first use in the forward pass.

    ``tp`` matters only for the padding of the vocabulary, and for the copies of heads of keys and values.
    """
    h, std = model.hidden, model.init_std
    vocabulary = (model.padded_vocab(tp), h)
    tensors = [
        TensorSpec(
            TOKEN_EMBEDDING,
            vocabulary,
            tp_dim=0,
            init="normal",
            std=std,
            rows=model.vocab_size,
            is_tied=model.tied_embeddings,
        )
    ]
    if model.positions == "learned":
        tensors += [
            TensorSpec(f"{name}.weight", (positions, h), init="normal", std=std)
            for name, positions in position_tables(model).items()
        ]
    if model.embedding_layernorm:
        tensors += _norm("embedding_norm", model)
    for layer in range(model.layers):
        prefix = f"blocks.{layer}"
        tensors += [
            *_norm(f"{prefix}.attention_norm", model),
            *_attention(f"{prefix}.attention", model, tp),
            *_norm(f"{prefix}.mlp_norm", model),
            *_mlp(f"{prefix}.mlp", model),
        ]
    tensors += _norm("final_norm", model)
    if not model.tied_embeddings:
        outputs = (model.padded_outputs(tp), h)
        tensors.append(TensorSpec(OUTPUT_WEIGHTS, outputs, tp_dim=0, init="normal", std=std, rows=model.outputs))
    return tensors


def position_tables(model: ModelConfig) -> Dict[str, int]:
    """The tables of learned positions, name → number of positions: one, or of a grid's rows and of its columns."""
    if model.is_grid_classifier:
        return dict.fromkeys(("row_embedding", "column_embedding"), model.grid_side)
    return {"position_embedding": model.seq_len}


def _norm(name: str, model: ModelConfig) -> List[TensorSpec]:
    tensors = [TensorSpec(f"{name}.weight", (model.hidden,), init="ones")]
    return tensors + ([TensorSpec(f"{name}.bias", (model.hidden,))] if model.norm == "layernorm" else [])


def _attention(name: str, model: ModelConfig, tp: int) -> List[TensorSpec]:
    """The tensors of an attention layer. Query, key and value weights are one tensor [3, heads * d, h], or where there
    are fewer heads of keys, [heads * d, h] and [2, kv heads * d, h]; they are cut along the heads. With more ranks than
    heads of keys, each such head is held by the neighbouring ranks whose query heads share it."""
    width = model.query_width
    kv_width = model.kv_head_count * model.head_size
    if model.kv_head_count == model.heads:
        tensors = _column_parallel(f"{name}.qkv", (3, width), model, model.biases != "none")
    else:
        tensors = _column_parallel(f"{name}.q", (width,), model, model.biases != "none")
        kv = _column_parallel(f"{name}.kv", (2, kv_width), model, model.biases != "none")
        tensors += [replace(spec, copies=model.kv_copies(tp)) for spec in kv]
    if model.qk_norm:
        shape = (model.head_size,)
        tensors += [TensorSpec(f"{name}.{of}_norm.weight", shape, init="ones", is_partial=True) for of in ("q", "k")]
    return tensors + _row_parallel(f"{name}.out", width, model)


def _mlp(name: str, model: ModelConfig) -> List[TensorSpec]:
    """The tensors of an MLP. SwiGLU's first weight has two parts, [2, f, h]: of the gate, and of what it gates."""
    f = model.ffn_size
    up = _column_parallel(f"{name}.up", (2, f) if model.mlp == "swiglu" else (f,), model, model.biases == "all")
    return up + _row_parallel(f"{name}.down", f, model)


def _column_parallel(name: str, rows: Tuple[int, ...], model: ModelConfig, has_bias: bool) -> List[TensorSpec]:
    cut = len(rows) - 1
    tensors = [TensorSpec(f"{name}.weight", (*rows, model.hidden), tp_dim=cut, init="normal", std=model.init_std)]
    return tensors + ([TensorSpec(f"{name}.bias", rows, tp_dim=cut)] if has_bias else [])


def _row_parallel(name: str, inputs: int, model: ModelConfig) -> List[TensorSpec]:
    # the two layers that write to the residual stream start smaller, by the depth (GPT-2, Radford et al. 2019, section
    # 2.3)
    std = model.init_std / math.sqrt(2 * model.layers)
    tensors = [TensorSpec(f"{name}.weight", (model.hidden, inputs), tp_dim=1, init="normal", std=std)]
    return tensors + ([TensorSpec(f"{name}.bias", (model.hidden,))] if model.biases == "all" else [])
