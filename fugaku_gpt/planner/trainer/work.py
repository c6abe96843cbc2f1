"""What a rank of our own trainer does in one iteration, counted by operation and shape: a function of the run alone.

Symbols: b sequences of s tokens in a micro-batch, h hidden, f width of the MLP, V padded vocabulary, t tensor-parallel
ranks; with sequence parallelism r = s / t tokens of each sequence are here between the cut layers, otherwise r = s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Counter as Counts
from typing import Iterator, List, Tuple

from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES, RunConfig
from fugaku_gpt.kernels.attention_tiling import (
    Blocks,
    attention_tiling,
    enough_heads_for_threads,
    head_slots,
)
from fugaku_gpt.layout.flat import flat_layout_of, is_sharded
from fugaku_gpt.layout.memory import ITEM_BYTES, recompute_of_layers
from fugaku_gpt.layout.native_kernels import may_use_native_kernels
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fugaku_gpt.layout.sequence import CHUNK_TOKENS
from fugaku_gpt.layout.stages import Chunk, chunks_of
from fugaku_gpt.machine.probed import (
    ATTENTION,
    ATTENTION_BACKWARD,
    INPUT,
    KEYS,
    LINEAR,
    NARROW_ALL_REDUCE,
    SCORES,
    VALUES,
    WEIGHT,
)


@dataclass
class Tally:
    """How often what is done.

    Attributes:
        products: by (kind, batch, rows, inner, columns).
        passes: by (name, elements).
        messages: by (operation, bytes), of tensor parallelism.
        layers, layers_back: passes through a layer, forward and backward, whose overhead is counted by itself.
    """

    products: "Counts[Tuple[str, int, int, int, int]]" = field(default_factory=Counter)
    passes: "Counts[Tuple[str, int]]" = field(default_factory=Counter)
    messages: "Counts[Tuple[str, int]]" = field(default_factory=Counter)
    layers: int = 0
    layers_back: int = 0

    def product(self, kind: str, rows: int, inner: int, columns: int, batch: int = 1, times: int = 1) -> None:
        """``times`` products [rows, inner][inner, columns], or batches of them."""
        self.products[kind, batch, rows, inner, columns] += times

    def over(self, name: str, elements: int, times: int = 1) -> None:
        """``times`` passes over so many elements."""
        self.passes[name, elements] += times

    def message(self, operation: str, size: int, times: int = 1) -> None:
        """``times`` messages of so many bytes."""
        self.messages[operation, size] += times

    def add(self, other: "Tally", times: int = 1) -> None:
        """All that another counts, so many times."""
        for mine, theirs in (
            (self.products, other.products),
            (self.passes, other.passes),
            (self.messages, other.messages),
        ):
            for key, count in theirs.items():
                mine[key] += times * count  # type: ignore[index]
        self.layers += times * other.layers
        self.layers_back += times * other.layers_back


@dataclass(frozen=True)
class ChunkWork:
    """One micro-batch through one chunk of the pipeline.

    Attributes:
        weights: what of the backward pass a schedule may put off.
    """

    chunk: Chunk
    forward: Tally
    backward: Tally
    weights: Tally


@dataclass(frozen=True)
class StageWork:
    """Once per iteration on a rank of one stage, after its pipeline.

    Attributes:
        replicas: (operation, bytes) of each sum over replicas, and of the gatherings of parameters.
        tied: bytes of the token embedding's sum with the other end of the pipeline; 0 where there is none.
        whole: bytes of the gradients that tensor-parallel ranks sum under sequence parallelism; 0 without.
    """

    replicas: Tuple[Tuple[str, int], ...]
    tied: int
    whole: int
    passes: Tally


def chunk_works(config: RunConfig, compiled: bool = False) -> List[ChunkWork]:
    """Of each chunk in the order of the forward pass.

    Args:
        compiled: there are compiled kernels, which compute attention where the run's type and threads are for it.
    """
    heads = config.model.heads // config.layout.tp
    apart = enough_heads_for_threads(config.training.micro_batch, heads, config.node.threads_per_rank or 1)
    compiled = compiled and apart and may_use_native_kernels(config)
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    found = []
    for chunk in chunks:
        forward, backward, weights = Tally(), Tally(), Tally()
        if chunk.has_embedding:
            _embedding(config, forward, backward)
        for layer in chunk.layers:
            _layer(config, kinds[layer], compiled, forward, backward)
            _weight_products(config, weights)
        if chunk.has_head:
            _head(config, forward, backward)
        found.append(ChunkWork(chunk, forward, backward, weights))
    return found


def message_bytes(config: RunConfig) -> int:
    """Of hidden states, or their gradient, between stages."""
    return ITEM_BYTES[config.training.dtype] * _between(config) * config.model.hidden


def stage_work(config: RunConfig, stage: int) -> StageWork:
    """Sums of gradients, optimiser, and what else an iteration ends with."""
    layout, training = config.layout, config.training
    flat = flat_layout_of(config, stage)
    item = ITEM_BYTES[training.dtype]
    narrow = training.dtype in SIXTEEN_BIT_DTYPES
    sharded = is_sharded(config)
    sum_bytes = 2 if training.gradient_dtype == "bfloat16" else max(item, 4)
    replicas: List[Tuple[str, int]] = []
    if layout.dp > 1:
        summing = REDUCE_SCATTER if sharded else ALL_REDUCE
        if sum_bytes == 2 and not sharded:
            summing = NARROW_ALL_REDUCE
        sizes = [bucket.stop - bucket.start for bucket in flat.buckets]
        replicas += [(summing, sum_bytes * size) for size in sizes]
        replicas += [(ALL_GATHER, item * size) for size in sizes] if sharded else []
    owned = flat.elements // (layout.dp if sharded else 1)
    passes = Tally()
    passes.over("zero", flat.elements)
    passes.over("squares", owned)
    passes.over("optimiser", owned)
    if narrow:
        passes.over("round", owned)
    if sum_bytes == 2 and layout.dp > 1:
        passes.over("round", flat.elements, 2)
    tied = flat.embedding.stop - flat.embedding.start if layout.pp > 1 else 0
    whole = flat.tp_replicated.stop - flat.tp_replicated.start if layout.sequence_parallel and layout.tp > 1 else 0
    wide = max(item, 4)
    return StageWork(tuple(replicas), wide * tied // (layout.dp if sharded else 1), wide * whole, passes)


def _between(config: RunConfig) -> int:
    """Tokens of a micro-batch between the cut layers."""
    parts = config.layout.tp if config.layout.sequence_parallel else 1
    return config.training.micro_batch * config.model.seq_len // parts


def _sum_name(config: RunConfig) -> str:
    return NARROW_ALL_REDUCE if config.training.dtype in SIXTEEN_BIT_DTYPES else ALL_REDUCE


def _layer(config: RunConfig, recompute: str, compiled: bool, forward: Tally, backward: Tally) -> None:
    once, back = Tally(), Tally()
    _layer_forward(config, once)
    _layer_backward(config, back)
    if compiled:
        _compiled_attention(config, ATTENTION, once)
        _compiled_attention(config, ATTENTION_BACKWARD, back)
    else:
        _attention_forward(config, once)
        _attention_backward(config, back)
    if config.model.attention_dropout:
        once.over("flags", _flags(config))
    if recompute == "full":
        back.add(once)
    elif recompute == "selective" and config.model.attention_dropout:
        back.over("flags", _flags(config))
    forward.add(once)
    backward.add(back)


def _layer_forward(config: RunConfig, tally: Tally) -> None:
    """But for attention between its linear layers."""
    model, t = config.model, config.layout.tp
    h, f = model.hidden, model.ffn_size
    tokens, here = config.training.micro_batch * model.seq_len, _between(config) * h
    tally.layers += 1
    tally.over("layer_norm", here, 2)
    tally.over("add", here, 2 if t == 1 else 4)  # residuals, and biases that wait for the sum
    if model.dropout:
        tally.over("dropout", here, 2)
    for inner, outer in _linears(config):
        tally.product(LINEAR, tokens, inner, outer)
    tally.over(f"gelu_{model.gelu}", tokens * f // t)
    if t > 1:
        size = ITEM_BYTES[config.training.dtype] * tokens * h
        if config.layout.sequence_parallel:
            tally.message(ALL_GATHER, size, 2)
            tally.message(REDUCE_SCATTER, size, 2)
        else:
            tally.message(_sum_name(config), size, 2)


def _layer_backward(config: RunConfig, tally: Tally) -> None:
    """But for attention between its linear layers."""
    model, t = config.model, config.layout.tp
    h, f = model.hidden, model.ffn_size
    tokens, here = config.training.micro_batch * model.seq_len, _between(config) * h
    tally.layers_back += 1
    tally.over("layer_norm", here, 2)  # done again, as GELU is: what they make is not kept
    tally.over(f"gelu_{model.gelu}", tokens * f // t)
    tally.over("layer_norm_backward", here, 2)
    tally.over("add", here, 2)  # where the residual's two gradients meet
    if model.dropout:
        tally.over("add", here, 2)  # times the mask that was kept
    for inner, outer in _linears(config):
        tally.product(INPUT, tokens, outer, inner)
        tally.over("sum_of_rows", tokens * outer)
    _weight_products(config, tally)
    tally.over(f"gelu_{model.gelu}_backward", tokens * f // t)
    if t > 1:
        size = ITEM_BYTES[config.training.dtype] * tokens * h
        if config.layout.sequence_parallel:  # what was gathered is not kept
            tally.message(ALL_GATHER, size, 4)
            tally.message(REDUCE_SCATTER, size, 2)
        else:
            tally.message(_sum_name(config), size, 2)


def _linears(config: RunConfig) -> Tuple[Tuple[int, int], ...]:
    """(inputs, outputs) of a rank's part of the matrices of a layer."""
    h, f, t = config.model.hidden, config.model.ffn_size, config.layout.tp
    return (h, 3 * h // t), (h // t, h), (h, f // t), (f // t, h)


def _weight_products(config: RunConfig, tally: Tally) -> None:
    """Gradients of a layer's weights."""
    for inner, outer in _linears(config):
        tally.product(WEIGHT, outer, config.training.micro_batch * config.model.seq_len, inner)


def _products(config: RunConfig) -> "Iterator[Tuple[int, int, int]]":
    """(heads whose products are one, queries, keys) of each block of a rank's attention. (A type that this build
    computes in float32 is cut as float32 is.)"""
    model, samples = config.model, config.training.micro_batch
    heads, s = model.heads // config.layout.tp, model.seq_len
    narrow = config.training.dtype in SIXTEEN_BIT_DTYPES
    cut: Blocks = attention_tiling(s, samples, heads, narrow, config.node.threads_per_rank or 1)
    for sample in range(0, samples, cut.samples):
        for head in range(0, heads, cut.heads):
            batch = min(cut.samples, samples - sample) * min(cut.heads, heads - head)
            for low in range(0, s, cut.queries):
                high = min(low + cut.queries, s)
                yield batch, high - low, high


def _compiled_attention(config: RunConfig, kind: str, tally: Tally) -> None:
    """All in one; with the heads that threads could have taken which have none left."""
    model, threads = config.model, config.node.threads_per_rank or 1
    heads = head_slots(config.training.micro_batch, model.heads // config.layout.tp, threads)
    tally.product(kind, model.seq_len, model.head_size, model.seq_len, heads)


def _attention_forward(config: RunConfig, tally: Tally) -> None:
    model = config.model
    d = model.head_size
    mine = config.training.micro_batch * model.seq_len * model.hidden // config.layout.tp
    # query, key and value to their heads, the query scaled, rows of blocks, the result back
    tally.over("copy", mine, 6)
    if model.attention_dropout:
        tally.over("copy", mine)  # the result scaled
    for batch, queries, keys in _products(config):
        tally.product(SCORES, queries, d, keys, batch)
        tally.over("add", batch * queries * queries)  # what hides the future
        tally.over("softmax", batch * queries * keys)
        if model.attention_dropout:
            tally.over("copy", batch * queries * keys, 2)
        tally.product(VALUES, queries, keys, d, batch)


def _attention_backward(config: RunConfig, tally: Tally) -> None:
    model = config.model
    d = model.head_size
    mine = config.training.micro_batch * model.seq_len * model.hidden // config.layout.tp
    # as above but for the result, whose gradient comes; the query's scaled, and three back
    tally.over("copy", mine, 10)
    if model.attention_dropout:
        tally.over("copy", mine)
    for batch, queries, keys in _products(config):
        tally.product(SCORES, queries, d, keys, batch, 2)  # probabilities again, and their gradient
        tally.over("add", batch * queries * queries)
        tally.product(KEYS, keys, queries, d, batch, 2)
        tally.product(VALUES, queries, keys, d, batch)
        tally.over("softmax", batch * queries * keys)
        tally.over("softmax_backward", batch * queries * keys)
        if model.attention_dropout:
            tally.over("copy", batch * queries * keys, 3)


def _flags(config: RunConfig) -> int:
    model = config.model
    return config.training.micro_batch * model.heads // config.layout.tp * model.seq_len**2


def _embedding(config: RunConfig, forward: Tally, backward: Tally) -> None:
    model, t = config.model, config.layout.tp
    whole = config.training.micro_batch * model.seq_len * model.hidden
    here = _between(config) * model.hidden
    forward.over("copy", whole)
    forward.over("add", here)
    backward.over("add", whole)  # to rows of the tables
    backward.over("add", here)
    if model.embedding_layernorm:
        forward.over("layer_norm", here)
        backward.over("layer_norm_backward", here)
    if model.dropout:
        forward.over("dropout", here)
        backward.over("add", here)
    size = ITEM_BYTES[config.training.dtype] * whole
    if t > 1 and config.layout.sequence_parallel:
        forward.message(REDUCE_SCATTER, size)
        backward.message(ALL_GATHER, size)
    elif t > 1:
        forward.message(_sum_name(config), size)


def _head(config: RunConfig, forward: Tally, backward: Tally) -> None:
    """Logits and loss, whose gradients are made in the forward pass."""
    model, t = config.model, config.layout.tp
    tokens, h, columns = config.training.micro_batch * model.seq_len, model.hidden, config.padded_vocab // t
    forward.over("layer_norm", _between(config) * h)
    backward.over("layer_norm_backward", _between(config) * h)
    for start in range(0, tokens, CHUNK_TOKENS):
        rows = min(CHUNK_TOKENS, tokens - start)
        forward.product(LINEAR, rows, h, columns)
        forward.product(INPUT, rows, columns, h)
        forward.product(WEIGHT, columns, rows, h)
        forward.over("loss", rows * columns)
        if t > 1:
            forward.message(ALL_GATHER, 4 * 3 * rows * t)
    if t > 1:
        size = ITEM_BYTES[config.training.dtype] * tokens * h
        forward.message(_sum_name(config) if not config.layout.sequence_parallel else ALL_GATHER, size)
        if config.layout.sequence_parallel:
            forward.message(REDUCE_SCATTER, size)
