"""The decoder: blocks of attention and an MLP, each after a norm, between the token embedding and the output weights.

By the fields of ``model.*`` it is GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU, output weights tied
to the embedding; or of Llama's kind (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, no biases.
Or it is no decoder: the classifier of grids has the same blocks over the cells of a grid, each of which sees all others
and has a row and a column, and the output weights take the mean over the cells.

Shapes: b sequences, s tokens, h hidden, V vocabulary. ``tp`` is only passed down to the layers that tensor parallelism
cuts. Under sequence parallelism [b, s, h] outside of them reads [b, s / tp, h]: this rank's part of each sequence.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import ModelConfig, RunConfig
from fugaku_gpt.layout.memory import recompute_of_layers
from fugaku_gpt.layout.stages import Chunk, chunk_tensors, split_layers
from fugaku_gpt.model.attention import CausalSelfAttention, Packing
from fugaku_gpt.model.cells import Cells
from fugaku_gpt.model.documents import Documents
from fugaku_gpt.model.dropout import KeyedDropout
from fugaku_gpt.model.init import fill_parameter
from fugaku_gpt.model.kv_cache import CachedLayer, KeyValueCache, NewTokens
from fugaku_gpt.model.norms import Norm, make_norm
from fugaku_gpt.model.recompute import recomputed
from fugaku_gpt.parallel.cross_entropy import (
    CorrectCount,
    LossOptions,
    vocab_parallel_cross_entropy,
    vocab_parallel_token_losses,
)
from fugaku_gpt.parallel.sequence import Shard, gather, sum_of_shards
from fugaku_gpt.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, look_up

_SITES_PER_BLOCK = 3  # dropout sites: attention probabilities, attention output, MLP output


class MLP(nn.Module):
    """The MLP of a layer: [b, s, h] → [b, s, h] through ffn_size; GELU or SwiGLU is computed again in the backward
    pass."""

    def __init__(self, model: ModelConfig, tp: Communicator, dtype: torch.dtype, sequence_parallel: bool) -> None:
        super().__init__()
        has_bias, sections = model.biases == "all", 2 if model.mlp == "swiglu" else 1  # of two, the first is the gate
        self.up = ColumnParallelLinear(
            model.hidden, model.ffn_size, tp, dtype, sections, sequence_parallel, has_bias=has_bias
        )
        self.down = RowParallelLinear(model.ffn_size, model.hidden, tp, dtype, sequence_parallel, has_bias=has_bias)
        gelu = ops.gelu_tanh if model.gelu == "tanh" else ops.gelu
        self._activation = ops.swiglu if model.mlp == "swiglu" else gelu

    def forward(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Apply the MLP to ``norm(x)``; ``norm`` is computed again in the backward pass."""
        return self.down(self.up(x, norm), self._activation)


class TransformerBlock(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    ``recompute`` says what the backward pass computes again: ``none``, ``selective`` (the flags of attention
    dropout) or ``full`` (the layer, of which only the input is saved). With a cache there is no backward pass.
    """

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        dtype: torch.dtype,
        seed: int,
        layer: int,
        sequence_parallel: bool = False,
        recompute: str = "none",
        reference_attention: bool = False,
    ) -> None:
        super().__init__()
        site = 1 + _SITES_PER_BLOCK * layer
        shard = Shard.of(tp, sequence_parallel)
        self.attention_norm = make_norm(model, dtype)
        self.attention = CausalSelfAttention(
            model, tp, dtype, seed, site, sequence_parallel, recompute == "selective", reference_attention
        )
        self.attention_dropout = KeyedDropout(model.dropout, seed, site + 1, shard)
        self.mlp_norm = make_norm(model, dtype)
        self.mlp = MLP(model, tp, dtype, sequence_parallel)
        self.mlp_dropout = KeyedDropout(model.dropout, seed, site + 2, shard)
        self._recompute_all = recompute == "full"

    def forward(
        self,
        x: torch.Tensor,
        first_sample: int,
        cached: Optional[CachedLayer] = None,
        packing: Optional[Packing] = None,
    ) -> torch.Tensor:
        if self._recompute_all and cached is None:
            return recomputed(lambda x: self._layer(x, first_sample, None, packing), x)
        return self._layer(x, first_sample, cached, packing)

    def _layer(
        self, x: torch.Tensor, first_sample: int, cached: Optional[CachedLayer], packing: Optional[Packing]
    ) -> torch.Tensor:
        attended = self.attention(x, first_sample, self.attention_norm, cached, packing)
        x = self.attention_dropout(attended, first_sample).add_(x)
        return self.mlp_dropout(self.mlp(x, self.mlp_norm), first_sample).add_(x)


class OutputWeights(nn.Module):
    """Output weights of their own, [V / tp, h]: the weights of the logits where they are not the token embedding, of
    the vocabulary or of the classes of grids."""

    def __init__(self, rows: int, width: int, tp: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows // tp.size, width, dtype=dtype))


class GPT(nn.Module):
    """A chunk of consecutive layers of the model, or the whole model.

    The first chunk takes token ids [b, s], later ones the hidden states [b, s, h] of the chunk before; the last returns
    the sum of the losses of the tokens, or of the grids, earlier ones hidden states. A last chunk without the
    embeddings still has a tied token embedding, as the weights of its logits: ``shared`` if this rank has it already,
    its own otherwise.

    Attributes:
        gradient_scale: factor of the loss for the last chunk's gradients (float16 loses small ones).
        shard: the part of each sequence that this rank has between the cut layers.
        correct: counts the grids whose class had the largest logit, in all forward passes of the last chunk; None of a
            decoder.
    """

    def __init__(
        self,
        config: RunConfig,
        tp: Communicator,
        chunk: Chunk,
        shared: Optional[VocabParallelEmbedding] = None,
        recompute: Sequence[str] = (),
        reference_attention: bool = False,
    ) -> None:
        """Create the chunk. ``recompute``: for each layer of the model, see :class:`TransformerBlock`; default:
        ``none``. ``reference_attention``: attention is computed by its definition."""
        super().__init__()
        model, dtype, seed = config.model, getattr(torch, config.training.dtype), config.training.seed
        sequence_parallel = config.layout.sequence_parallel and tp.size > 1
        self.config = model
        self.chunk = chunk
        self.gradient_scale = 1.0
        self.correct = CorrectCount() if model.is_grid_classifier else None
        self._tp = tp
        self._sequence_parallel = sequence_parallel
        self.shard = Shard.of(tp, sequence_parallel)
        kinds = recompute or ("none",) * model.layers
        if chunk.has_embedding or (chunk.has_head and model.tied_embeddings):
            self.token_embedding = shared or VocabParallelEmbedding(
                model.padded_vocab(tp.size), model.hidden, tp, dtype, sequence_parallel
            )
        if chunk.has_embedding:
            if model.positions == "learned":
                self._add_position_tables(dtype)
            self.embedding_norm = make_norm(model, dtype) if model.embedding_layernorm else nn.Identity()
            self.embedding_dropout = KeyedDropout(model.dropout, seed, 0, self.shard)
        self.blocks = nn.ModuleDict(
            {
                str(layer): TransformerBlock(
                    model, tp, dtype, seed, layer, sequence_parallel, kinds[layer], reference_attention
                )
                for layer in chunk.layers
            }
        )
        if chunk.has_head:
            self.final_norm = make_norm(model, dtype)
            if not model.tied_embeddings:
                self.output = OutputWeights(model.padded_outputs(tp.size), model.hidden, tp, dtype)

    def _add_position_tables(self, dtype: torch.dtype) -> None:
        """Add the learned positions: of a grid tables of its rows and its columns, which every rank has whole."""
        model = self.config
        if model.is_grid_classifier:
            alone = Communicator.alone()
            self.row_embedding = VocabParallelEmbedding(model.grid_side, model.hidden, alone, dtype)
            self.column_embedding = VocabParallelEmbedding(model.grid_side, model.hidden, alone, dtype)
        else:
            self.position_embedding = nn.Embedding(model.seq_len, model.hidden).to(dtype)

    @property
    def output_weight(self) -> nn.Parameter:
        """The weights of the logits, [V / tp, h], of the last chunk."""
        return self.token_embedding.weight if self.config.tied_embeddings else self.output.weight

    def hidden_states(
        self,
        x: torch.Tensor,
        first_sample: int = 0,
        cache: Optional[KeyValueCache] = None,
        new: Optional[NewTokens] = None,
        cells: Optional[Cells] = None,
        documents: Optional[Documents] = None,
    ) -> torch.Tensor:
        """Return [b, s, h] of [b, s] int64 or [b, s, h], equal on every rank of ``tp`` unless sequence-parallel.

        With ``cache``, the tokens continue sequences, at the places that ``new`` has for them. With ``cells``, they are
        the colors of those. With ``documents``, each sees its own alone.
        """
        if self.chunk.has_embedding:
            positions = self.shard.positions(x.shape[1]) if new is None else new.positions
            x = self.token_embedding(self.shard.to_rank_order(x))
            if self.config.positions == "learned" and cells is not None:
                x = x + self.row_embedding(cells.rows) + self.column_embedding(cells.columns)
            elif self.config.positions == "learned" and documents is not None and documents.positions is not None:
                x = x + look_up(documents.positions, self.position_embedding.weight)
            elif self.config.positions == "learned":
                x = x + self.position_embedding.weight[positions]
            x = self.embedding_dropout(self.embedding_norm(x), first_sample)
        for number, block in self.blocks.items():
            cached = cache.layer(int(number), new) if cache is not None and new is not None else None
            x = block(x, first_sample, cached, cells if cells is not None else documents)
        return self.final_norm(x) if self.chunk.has_head else x

    def forward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        first_sample: int = 0,
        cells: Optional[Cells] = None,
        documents: Optional[Documents] = None,
    ) -> torch.Tensor:
        """Return hidden states, or from the last chunk the sum over all b * s tokens of the cross-entropy of
        ``targets`` [b, s], or over b grids with these ``cells`` of that of their classes [b, 1]; ``first_sample`` keys
        dropout. With ``documents``, targets that are ``NO_TARGET`` have no loss."""
        x = self.hidden_states(x, first_sample, cells=cells, documents=documents)
        if not self.chunk.has_head:
            return x
        if cells is not None:
            x = self._mean_over(cells, x)
        return self._cross_entropy(x, targets, documents is not None)

    def _mean_over(self, cells: Cells, x: torch.Tensor) -> torch.Tensor:
        """Return the means [b, h] of hidden states over the cells of each grid, equal on every rank of ``tp``."""
        sums = cells.sums(x)
        if self._sequence_parallel:
            sums = sum_of_shards(sums, self._tp)
        return (sums / cells.counts).to(x.dtype)

    def _cross_entropy(self, x: torch.Tensor, targets: torch.Tensor, has_gaps: bool) -> torch.Tensor:
        """Return the sum of the losses of hidden states [b, s, h] or of means over cells [b, h]; ``has_gaps``: some
        targets may be ``NO_TARGET``."""
        is_cut = self._sequence_parallel and x.dim() == 3
        return vocab_parallel_cross_entropy(
            x.view(-1, x.shape[-1]),
            self.output_weight,
            (self.shard.to_rank_order(targets) if is_cut else targets).reshape(-1),
            self._tp,
            self.config.outputs,
            options=LossOptions(is_cut, self.gradient_scale, self.correct, has_gaps),
        )

    def last_logits(self, x: torch.Tensor, last: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the logits [b, V] after the last token of hidden states [b, t, h], or after the token ``last`` [b] of
        each, without the padding of the vocabulary, equal on every rank of ``tp``; collective."""
        rows = x[:, -1] if last is None else x[torch.arange(len(x)), last]
        logits = ops.linear_of_few_rows(rows, self.output_weight)
        gathered = self._tp.all_gather(logits)  # [tp, b, V / tp]
        return gathered.transpose(0, 1).reshape(len(x), -1)[:, : self.config.vocab_size]

    def token_losses(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy [b, s] of each of the ``targets`` [b, s] after hidden states [b, s, h], equal on
        every rank of ``tp``; without gradients; collective."""
        if self._sequence_parallel:
            x = self.shard.to_sample_order(gather(x, self._tp))
        losses = vocab_parallel_token_losses(
            x.reshape(-1, x.shape[-1]), self.output_weight, targets.reshape(-1), self._tp, self.config.vocab_size
        )
        return losses.view(targets.shape)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of [b, s] tokens as [b, s, V / tp], this rank's part of the padded vocabulary; for tests
        and for inspecting a whole model."""
        x = self.hidden_states(tokens)
        if self._sequence_parallel:
            x = self.shard.to_sample_order(gather(x, self._tp))
        return ops.linear(x, self.output_weight)


def build_model(config: RunConfig, tp: Communicator, reference_attention: bool = False) -> GPT:
    """Build the whole model of a run on this rank; see :func:`build_stage`."""
    chunks = split_layers(config.model.layers, 1)
    (model,) = build_stage(config, tp, chunks, recompute_of(config, chunks), reference_attention)
    return model


def recompute_of(config: RunConfig, chunks: Sequence[Chunk]) -> Tuple[str, ...]:
    """Return what the backward pass computes again, for each layer of the model (:class:`TransformerBlock`)."""
    return recompute_of_layers(config, chunks)


def build_stage(
    config: RunConfig,
    tp: Communicator,
    chunks: Sequence[Chunk],
    recompute: Sequence[str] = (),
    reference_attention: bool = False,
    *,
    initialise: bool = True,
) -> List[GPT]:
    """Build the chunks that this rank holds, with this rank's slices of the initial weights.

    Args:
        recompute: what the backward pass computes again, for each layer of the model (:func:`recompute_of`); default:
            nothing.
        reference_attention: attention is computed by its definition, to check faster ways.
        initialise: whether weights get their initial values; otherwise the caller fills them.

    Raises:
        ValueError: the module tree and ``layout.tensors`` disagree.
    """
    models: List[GPT] = []
    for chunk in chunks:
        is_shared = bool(models) and models[0].chunk.has_embedding and chunk.has_head and config.model.tied_embeddings
        shared = models[0].token_embedding if is_shared else None
        models.append(GPT(config, tp, chunk, shared, recompute, reference_attention))
    parameters = named_parameters(models)
    specs = {spec.name: spec for chunk in chunks for spec in chunk_tensors(config.model, tp.size, chunk)}
    expected = {spec.name: spec.local_shape(tp.size) for spec in specs.values()}
    actual = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if expected != actual:
        raise ValueError(
            f"the model's parameters and layout.tensors differ: {sorted(set(expected.items()) ^ set(actual.items()))}"
        )
    for spec in specs.values() if initialise else ():
        fill_parameter(parameters[spec.name], spec, config.training.seed, tp.rank, tp.size)
    return models


def named_parameters(models: Sequence[GPT]) -> Dict[str, nn.Parameter]:
    """Return the parameters of a rank's chunks by name, each once."""
    return {name: parameter for model in models for name, parameter in model.named_parameters()}
