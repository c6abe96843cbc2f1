"""GPT-2 (Radford et al. 2019): pre-LayerNorm blocks, learned positions, output weights tied to the token embedding.

Shapes: b sequences, s tokens, h hidden, V vocabulary. The ``tp`` that is handed down only reaches the layers that are
cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import ModelConfig, RunConfig
from fugaku_gpt.layout.tensors import model_tensors
from fugaku_gpt.model.attention import CausalSelfAttention
from fugaku_gpt.model.dropout import KeyedDropout
from fugaku_gpt.model.init import fill_parameter
from fugaku_gpt.parallel.cross_entropy import vocab_parallel_cross_entropy
from fugaku_gpt.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

_SITES_PER_BLOCK = 3  # dropout sites: attention probabilities, attention output, MLP output


class MLP(nn.Module):
    """[b, s, h] → [b, s, h] through ffn_size."""

    def __init__(self, model: ModelConfig, tp: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(model.hidden, model.ffn_size, tp, dtype)
        self.down = RowParallelLinear(model.ffn_size, model.hidden, tp, dtype)
        self._gelu = compat.gelu_tanh if model.gelu == "tanh" else F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, tp: Communicator, dtype: torch.dtype, seed: int, layer: int) -> None:
        super().__init__()
        site = 1 + _SITES_PER_BLOCK * layer
        self.attention_norm = nn.LayerNorm(model.hidden, eps=model.layernorm_eps).to(dtype)
        self.attention = CausalSelfAttention(model, tp, dtype, seed, site)
        self.attention_dropout = KeyedDropout(model.dropout, seed, site + 1)
        self.mlp_norm = nn.LayerNorm(model.hidden, eps=model.layernorm_eps).to(dtype)
        self.mlp = MLP(model, tp, dtype)
        self.mlp_dropout = KeyedDropout(model.dropout, seed, site + 2)

    def forward(self, x: torch.Tensor, first_sample: int) -> torch.Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), first_sample), first_sample)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), first_sample)


class GPT(nn.Module):
    """The whole model: token ids in, sum of the tokens' losses out."""

    def __init__(self, model: ModelConfig, tp: Communicator, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.config = model
        self._tp = tp
        self.token_embedding = VocabParallelEmbedding(model.padded_vocab(tp.size), model.hidden, tp, dtype)
        self.position_embedding = nn.Embedding(model.seq_len, model.hidden).to(dtype)
        self.embedding_norm = (
            nn.LayerNorm(model.hidden, eps=model.layernorm_eps).to(dtype)
            if model.embedding_layernorm
            else nn.Identity()
        )
        self.embedding_dropout = KeyedDropout(model.dropout, seed, site=0)
        self.blocks = nn.ModuleList([Block(model, tp, dtype, seed, layer) for layer in range(model.layers)])
        self.final_norm = nn.LayerNorm(model.hidden, eps=model.layernorm_eps).to(dtype)

    def hidden_states(self, tokens: torch.Tensor, first_sample: int = 0) -> torch.Tensor:
        """[b, s] int64 → [b, s, h] after the last LayerNorm, equal on every rank of ``tp``."""
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        x = self.embedding_dropout(self.embedding_norm(x), first_sample)
        for block in self.blocks:
            x = block(x, first_sample)
        return self.final_norm(x)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, first_sample: int = 0) -> torch.Tensor:
        """Sum over all b * s tokens of the cross-entropy of ``targets`` [b, s]; ``first_sample`` keys dropout."""
        x = self.hidden_states(tokens, first_sample)
        return vocab_parallel_cross_entropy(
            x.view(-1, x.shape[-1]), self.token_embedding.weight, targets.reshape(-1), self._tp, self.config.vocab_size
        )

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] → [b, s, V / tp], this rank's part of the padded vocabulary; for tests and for looking at the
        model."""
        return F.linear(self.hidden_states(tokens), self.token_embedding.weight)


def build_model(config: RunConfig, tp: Communicator) -> GPT:
    """The model of a run with its initial weights, this rank's slices of them.

    Raises:
        ValueError: the module tree and ``layout.tensors`` disagree.
    """
    model = GPT(config.model, tp, getattr(torch, config.training.dtype), config.training.seed)
    parameters = dict(model.named_parameters())
    specs = model_tensors(config.model, tp.size)
    expected = {spec.name: spec.local_shape(tp.size) for spec in specs}
    found = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if expected != found:
        raise ValueError(
            f"the model's parameters and layout.tensors differ: {sorted(set(expected.items()) ^ set(found.items()))}"
        )
    for spec in specs:
        fill_parameter(parameters[spec.name], spec, config.training.seed, tp.rank, tp.size)
    return model
