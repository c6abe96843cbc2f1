"""The tensors of a GPT by name, and which slice of each a tensor-parallel rank holds.

The model builds its parameters from this table; initial values, gradient norms and checkpoints go by it, so
they cannot disagree about what a name means. Names follow the module tree of ``model/gpt.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

from fugaku_gpt.config.schema import ModelConfig

TOKEN_EMBEDDING = "token_embedding.weight"


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor of the model.

    Attributes:
        name: as in ``named_parameters()``.
        shape: of the whole tensor.
        tp_dim: dimension that is cut over the tensor-parallel ranks; None where every rank holds the whole tensor.
        init: ``normal``, ``zeros`` or ``ones``.
        std: standard deviation where init is normal.
        rows: rows of dimension 0 that are ever used; the rest is vocabulary padding and stays zero.
    """

    name: str
    shape: Tuple[int, ...]
    tp_dim: Optional[int] = None
    init: str = "zeros"
    std: float = 0.0
    rows: Optional[int] = None

    @property
    def decays(self) -> bool:
        """Whether AdamW's weight decay applies: to matrices, not to biases and LayerNorm."""
        return self.init == "normal"

    def slice_of(self, tp_rank: int, tp: int) -> Tuple[slice, ...]:
        """The part of the whole tensor that one tensor-parallel rank holds."""
        full_slices = tuple(slice(0, size) for size in self.shape)
        if self.tp_dim is None:
            return full_slices
        width = self.shape[self.tp_dim] // tp
        local = slice(tp_rank * width, (tp_rank + 1) * width)
        return (*full_slices[: self.tp_dim], local, *full_slices[self.tp_dim + 1 :])

    def local_shape(self, tp: int) -> Tuple[int, ...]:
        """Shape of one rank's part."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))


def model_tensors(model: ModelConfig, tp: int) -> List[TensorSpec]:
    """Every tensor of the model, in order of first use in the forward pass.

    ``tp`` matters only for the padding of the vocabulary. The query, key and value weights are one tensor
    [3, hidden, hidden], cut along the middle dimension, which is the heads.
    """
    h, f, std = model.hidden, model.ffn_size, model.init_std
    # the two layers that write to the residual stream start smaller, by the depth (GPT-2, Radford et al. 2019, section
    # 2.3)
    residual_std = std / math.sqrt(2 * model.layers)
    tensors = [
        TensorSpec(
            TOKEN_EMBEDDING,
            (model.padded_vocab(tp), h),
            tp_dim=0,
            init="normal",
            std=std,
            rows=model.vocab_size,
        ),
        TensorSpec("position_embedding.weight", (model.seq_len, h), init="normal", std=std),
    ]
    if model.embedding_layernorm:
        tensors += _layer_norm("embedding_norm", h)
    for layer in range(model.layers):
        prefix = f"blocks.{layer}"
        tensors += [
            *_layer_norm(f"{prefix}.attention_norm", h),
            TensorSpec(f"{prefix}.attention.qkv.weight", (3, h, h), tp_dim=1, init="normal", std=std),
            TensorSpec(f"{prefix}.attention.qkv.bias", (3, h), tp_dim=1),
            TensorSpec(f"{prefix}.attention.out.weight", (h, h), tp_dim=1, init="normal", std=residual_std),
            TensorSpec(f"{prefix}.attention.out.bias", (h,)),
            *_layer_norm(f"{prefix}.mlp_norm", h),
            TensorSpec(f"{prefix}.mlp.up.weight", (f, h), tp_dim=0, init="normal", std=std),
            TensorSpec(f"{prefix}.mlp.up.bias", (f,), tp_dim=0),
            TensorSpec(f"{prefix}.mlp.down.weight", (h, f), tp_dim=1, init="normal", std=residual_std),
            TensorSpec(f"{prefix}.mlp.down.bias", (h,)),
        ]
    return tensors + _layer_norm("final_norm", h)


def _layer_norm(name: str, hidden: int) -> List[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (hidden,), init="ones"), TensorSpec(f"{name}.bias", (hidden,))]
