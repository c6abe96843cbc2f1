"""Counts the operations of a rank of our own trainer in one iteration by kind and shape, from the run alone.

Symbols: b sequences of s tokens in a micro-batch, h hidden, f width of the MLP, V padded vocabulary, t tensor-parallel
ranks; with sequence parallelism a rank has r = s / t tokens of each sequence between tensor-parallel layers, otherwise
r = s. A grid classifier's sequences are grids of the largest bucket, of s cells; V are its padded classes. Padding is
counted like other cells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Counter as Counts
from typing import Iterator, List, NamedTuple, Tuple

from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES, RunConfig
from fugaku_gpt.kernels.attention_tiling import (
    AttentionTiling,
    attention_tiling,
    enough_heads_for_threads,
    head_slots,
)
from fugaku_gpt.layout.communications import CHUNK_TOKENS
from fugaku_gpt.layout.flat import flat_layout_of, is_sharded
from fugaku_gpt.layout.memory import ITEM_BYTES, recompute_of_layers
from fugaku_gpt.layout.native_kernels import may_use_native_kernels
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fugaku_gpt.layout.stages import Chunk, chunks_of
from fugaku_gpt.layout.tensors import position_tables
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
    """Number of operations of each kind and shape.

    Attributes:
        products: matrix products by (kind, batch, rows, inner, columns).
        passes: elementwise passes by (name, elements).
        messages: messages of tensor parallelism by (operation, bytes).
        layers, layers_back: passes through a layer, forward and backward, whose overhead is counted separately.
    """

    products: "Counts[Tuple[str, int, int, int, int]]" = field(default_factory=Counter)
    passes: "Counts[Tuple[str, int]]" = field(default_factory=Counter)
    messages: "Counts[Tuple[str, int]]" = field(default_factory=Counter)
    layers: int = 0
    layers_back: int = 0

    def add_product(self, kind: str, rows: int, inner: int, columns: int, batch: int = 1, times: int = 1) -> None:
        """Adds ``times`` products [rows, inner][inner, columns], or batches of them."""
        self.products[kind, batch, rows, inner, columns] += times

    def add_elementwise(self, name: str, elements: int, times: int = 1) -> None:
        """Adds ``times`` passes over ``elements`` elements."""
        self.passes[name, elements] += times

    def add_message(self, operation: str, size: int, times: int = 1) -> None:
        """Adds ``times`` messages of ``size`` bytes."""
        self.messages[operation, size] += times

    def add(self, other: "Tally", times: int = 1) -> None:
        """Adds all counts of another tally, multiplied by ``times``."""
        for own_counts, other_counts in (
            (self.products, other.products),
            (self.passes, other.passes),
            (self.messages, other.messages),
        ):
            for key, count in other_counts.items():
                own_counts[key] += times * count  # type: ignore[index]
        self.layers += times * other.layers
        self.layers_back += times * other.layers_back


@dataclass(frozen=True)
class ChunkWork:
    """Operations of one micro-batch in one chunk of the pipeline.

    Attributes:
        weights: the part of the backward pass that a schedule may defer.
    """

    chunk: Chunk
    forward: Tally
    backward: Tally
    weights: Tally


@dataclass(frozen=True)
class StageWork:
    """Operations once per iteration on a rank of one stage, after its pipeline.

    Attributes:
        replicas: (operation, bytes) of each sum over replicas and each all-gather of parameters.
        tied_bytes: bytes of the tied token embedding's sum with the other end of the pipeline; 0 without one.
        replicated_bytes: bytes of the gradients of replicated parameters, which tensor-parallel ranks sum under
            sequence parallelism; 0 without it.
        copied_bytes: bytes of the gradients of heads of keys and values that several tensor-parallel ranks hold.
    """

    replicas: Tuple[Tuple[str, int], ...]
    tied_bytes: int
    replicated_bytes: int
    copied_bytes: int
    passes: Tally


def count_chunk_work(config: RunConfig, compiled: bool = False) -> List[ChunkWork]:
    """Counts the work of each chunk, in the order of the forward pass.

    Args:
        compiled: whether there are compiled kernels, which compute attention if the run's type and threads allow it.
    """
    heads = config.model.heads // config.layout.tp
    splits_heads = enough_heads_for_threads(config.training.micro_batch, heads, config.node.threads_per_rank or 1)
    compiled = compiled and splits_heads and may_use_native_kernels(config)
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    works = []
    for chunk in chunks:
        forward, backward, weights = Tally(), Tally(), Tally()
        if chunk.has_embedding:
            _embedding(config, forward, backward)
        for layer in chunk.layers:
            _layer(config, kinds[layer], compiled, forward, backward)
            _weight_products(config, weights)
        if chunk.has_head:
            _head(config, forward, backward)
        works.append(ChunkWork(chunk, forward, backward, weights))
    return works


def message_bytes(config: RunConfig) -> int:
    """Bytes of a message of hidden states, or of their gradient, between stages."""
    return ITEM_BYTES[config.training.dtype] * _tokens_between_layers(config) * config.model.hidden


def count_stage_work(config: RunConfig, stage: int) -> StageWork:
    """Counts the end of an iteration: sums of gradients and the optimiser."""
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
    passes.add_elementwise("zero", flat.elements)
    passes.add_elementwise("squares", owned)
    passes.add_elementwise("optimiser", owned)
    if narrow:
        passes.add_elementwise("round", owned)
    if sum_bytes == 2 and layout.dp > 1:
        passes.add_elementwise("round", flat.elements, 2)
    tied = flat.embedding.stop - flat.embedding.start if layout.pp > 1 else 0
    summed = flat.summed_over_tp(layout.sequence_parallel)
    replicated = summed.stop - summed.start if layout.tp > 1 else 0
    copied = flat.copied.stop - flat.copied.start
    wide = max(item, 4)
    tied_bytes = wide * tied // (layout.dp if sharded else 1)
    return StageWork(tuple(replicas), tied_bytes, wide * replicated, wide * copied, passes)


def _tokens_between_layers(config: RunConfig) -> int:
    """Tokens of a micro-batch that a rank has between tensor-parallel layers."""
    shares = config.layout.tp if config.layout.sequence_parallel else 1
    return config.training.micro_batch * config.model.seq_len // shares


def _all_reduce_name(config: RunConfig) -> str:
    return NARROW_ALL_REDUCE if config.training.dtype in SIXTEEN_BIT_DTYPES else ALL_REDUCE


def _layer(config: RunConfig, recompute: str, compiled: bool, forward: Tally, backward: Tally) -> None:
    layer_forward, layer_backward = Tally(), Tally()
    _layer_forward(config, layer_forward)
    _layer_backward(config, layer_backward)
    if compiled:
        _compiled_attention(config, ATTENTION, layer_forward)
        _compiled_attention(config, ATTENTION_BACKWARD, layer_backward)
    else:
        _attention_forward(config, layer_forward)
        _attention_backward(config, layer_backward)
    if config.model.attention_dropout:
        layer_forward.add_elementwise("flags", _dropout_flags(config))
    if recompute == "full":
        layer_backward.add(layer_forward)
    elif recompute == "selective" and config.model.attention_dropout:
        layer_backward.add_elementwise("flags", _dropout_flags(config))
    forward.add(layer_forward)
    backward.add(layer_backward)


def _layer_forward(config: RunConfig, tally: Tally) -> None:
    """Counts the forward pass of a layer except for attention."""
    model, t = config.model, config.layout.tp
    h = model.hidden
    tokens, elements = config.training.micro_batch * model.seq_len, _tokens_between_layers(config) * h
    tally.layers += 1
    tally.add_elementwise(_norm(config), elements, 2)
    tally.add_elementwise("add", elements, 2 if t == 1 else 4)  # residuals, and biases that wait for the sum
    if model.dropout:
        tally.add_elementwise("dropout", elements, 2)
    for inner, outer in _linears(config):
        tally.add_product(LINEAR, tokens, inner, outer)
    _activation(config, tally)
    _packing(config, tally)
    if t > 1:
        size = ITEM_BYTES[config.training.dtype] * tokens * h
        if config.layout.sequence_parallel:
            tally.add_message(ALL_GATHER, size, 2)
            tally.add_message(REDUCE_SCATTER, size, 2)
        else:
            tally.add_message(_all_reduce_name(config), size, 2)


def _layer_backward(config: RunConfig, tally: Tally) -> None:
    """Counts the backward pass of a layer except for attention."""
    model, t = config.model, config.layout.tp
    h = model.hidden
    tokens, elements = config.training.micro_batch * model.seq_len, _tokens_between_layers(config) * h
    tally.layers_back += 1
    tally.add_elementwise(_norm(config), elements, 2)  # recomputed like GELU: their results are not saved
    _activation(config, tally)
    tally.add_elementwise(f"{_norm(config)}_backward", elements, 2)
    tally.add_elementwise("add", elements, 2)  # where the residual's two gradients meet
    if model.dropout:
        tally.add_elementwise("add", elements, 2)  # times the saved mask
    for inner, outer in _linears(config):
        tally.add_product(INPUT, tokens, outer, inner)
    for outer in _biases(config):
        tally.add_elementwise("sum_of_rows", tokens * outer)
    _weight_products(config, tally)
    _activation(config, tally, "_backward")
    _packing(config, tally, "_backward")
    if t > 1:
        size = ITEM_BYTES[config.training.dtype] * tokens * h
        if config.layout.sequence_parallel:  # gathered tensors are not saved
            tally.add_message(ALL_GATHER, size, 4)
            tally.add_message(REDUCE_SCATTER, size, 2)
        else:
            tally.add_message(_all_reduce_name(config), size, 2)


def _norm(config: RunConfig) -> str:
    return "rms_norm" if config.model.norm == "rmsnorm" else "layer_norm"


def _activation(config: RunConfig, tally: Tally, suffix: str = "") -> None:
    """Counts GELU, or SwiGLU by the elements of both of its parts."""
    model = config.model
    name = f"gelu_{model.gelu}" if model.mlp == "gelu" else "swiglu"
    tokens = config.training.micro_batch * model.seq_len
    tally.add_elementwise(f"{name}{suffix}", tokens * model.up_width // config.layout.tp)


def _packing(config: RunConfig, tally: Tally, suffix: str = "") -> None:
    """Counts the norms of queries and keys, and the copy of queries, keys and values beside each other, rotated."""
    model, t = config.model, config.layout.tp
    tokens, heads = config.training.micro_batch * model.seq_len, model.heads // t + model.local_kv_heads(t)
    if model.qk_norm:
        tally.add_elementwise(f"rms_norm{suffix}", tokens * heads * model.head_size)
    if model.positions == "rope":
        tally.add_elementwise(f"rotary{suffix}", tokens * model.local_qkv_width(t))
    elif model.qk_norm or model.kv_head_count != model.heads:
        tally.add_elementwise("copy", tokens * model.local_qkv_width(t))


def _linears(config: RunConfig) -> Tuple[Tuple[int, int], ...]:
    """(inputs, outputs) of a rank's shards of the matrices of a layer."""
    model, t = config.model, config.layout.tp
    h, q, f = model.hidden, model.query_width, model.ffn_size
    return (h, model.local_qkv_width(t)), (q // t, h), (h, model.up_width // t), (f // t, h)


def _biases(config: RunConfig) -> Tuple[int, ...]:
    """Elements of a rank's shards of the biases of a layer."""
    widths = tuple(outer for _, outer in _linears(config))
    return {"all": widths, "qkv": widths[:1], "none": ()}[config.model.biases]


def _weight_products(config: RunConfig, tally: Tally) -> None:
    """Counts the products for the gradients of a layer's weights."""
    for inner, outer in _linears(config):
        tally.add_product(WEIGHT, outer, config.training.micro_batch * config.model.seq_len, inner)


class _Tile(NamedTuple):
    """A tile of a rank's attention.

    Attributes:
        batch: heads of keys of a batched product.
        rows: queries of each of these, of all heads that share it.
        keys: keys that any of the queries sees.
        masked: elements of all scores that the causal mask is added to.
    """

    batch: int
    rows: int
    keys: int
    masked: int


def _attention_tiles(config: RunConfig) -> "Iterator[_Tile]":
    """Yields the tiles of a rank's attention.

    A type that this build computes in float32 is tiled like float32.
    """
    model, samples = config.model, config.training.micro_batch
    heads, s = model.local_kv_heads(config.layout.tp), model.seq_len
    sharing = model.heads // config.layout.tp // heads
    narrow = config.training.dtype in SIXTEEN_BIT_DTYPES
    tiling: AttentionTiling = attention_tiling(s, samples, heads, narrow, config.node.threads_per_rank or 1, sharing)
    for sample in range(0, samples, tiling.samples):
        for head in range(0, heads, tiling.heads):
            batch = min(tiling.samples, samples - sample) * min(tiling.heads, heads - head)
            for low in range(0, s, tiling.queries):
                high = min(low + tiling.queries, s)
                rows = (high - low) * sharing
                if model.is_grid_classifier:  # cells see all cells, and no row of a tile has a mask of its own
                    yield _Tile(batch, rows, s, 0)
                else:  # all queries of a tile see the keys up to its first query
                    yield _Tile(batch, rows, high, batch * rows * (high - low - 1))


def _compiled_attention(config: RunConfig, kind: str, tally: Tally) -> None:
    """Counts attention as one operation; heads for which threads are idle in the last round count as well. It is timed
    with a causal mask, so that a head of a grid classifier, which has all scores, counts as two."""
    model, threads = config.model, config.node.threads_per_rank or 1
    heads = head_slots(config.training.micro_batch, model.heads // config.layout.tp, threads)
    heads *= 2 if model.is_grid_classifier else 1
    tally.add_product(kind, model.seq_len, model.head_size, model.seq_len, heads)


def _elements_of_heads(config: RunConfig) -> Tuple[int, int]:
    """Elements of a rank's queries, and of its keys."""
    model, t = config.model, config.layout.tp
    tokens, kv_heads = config.training.micro_batch * model.seq_len, model.local_kv_heads(t)
    return tokens * model.query_width // t, tokens * kv_heads * model.head_size


def _attention_forward(config: RunConfig, tally: Tally) -> None:
    model = config.model
    d = model.head_size
    elements, key_elements = _elements_of_heads(config)
    # queries, keys and values to their heads; queries scaled, rows of blocks, the result back
    tally.add_elementwise("copy", elements, 4)
    tally.add_elementwise("copy", key_elements, 2)
    if model.attention_dropout:
        tally.add_elementwise("copy", elements)  # the result scaled
    for batch, queries, keys, masked in _attention_tiles(config):
        tally.add_product(SCORES, queries, d, keys, batch)
        tally.add_elementwise("add", masked)
        tally.add_elementwise("softmax", batch * queries * keys)
        if model.attention_dropout:
            tally.add_elementwise("copy", batch * queries * keys, 2)
        tally.add_product(VALUES, queries, keys, d, batch)


def _attention_backward(config: RunConfig, tally: Tally) -> None:
    model = config.model
    d = model.head_size
    elements, key_elements = _elements_of_heads(config)
    # as in the forward pass except for the result, whose gradient arrives; the queries' is scaled, and all are copied
    # back
    tally.add_elementwise("copy", elements, 6)
    tally.add_elementwise("copy", key_elements, 4)
    if model.attention_dropout:
        tally.add_elementwise("copy", elements)
    for batch, queries, keys, masked in _attention_tiles(config):
        tally.add_product(SCORES, queries, d, keys, batch, 2)  # probabilities again, and their gradient
        tally.add_elementwise("add", masked)
        tally.add_product(KEYS, keys, queries, d, batch, 2)
        tally.add_product(VALUES, queries, keys, d, batch)
        tally.add_elementwise("softmax", batch * queries * keys)
        tally.add_elementwise("softmax_backward", batch * queries * keys)
        if model.attention_dropout:
            tally.add_elementwise("copy", batch * queries * keys, 3)


def _dropout_flags(config: RunConfig) -> int:
    model = config.model
    return config.training.micro_batch * model.heads // config.layout.tp * model.seq_len**2


def _embedding(config: RunConfig, forward: Tally, backward: Tally) -> None:
    model, t = config.model, config.layout.tp
    elements = config.training.micro_batch * model.seq_len * model.hidden
    local_elements = _tokens_between_layers(config) * model.hidden
    forward.add_elementwise("copy", elements)
    backward.add_elementwise("add", elements)  # added to rows of the embedding tables
    if model.positions == "learned":
        tables = len(position_tables(model))
        forward.add_elementwise("add", local_elements, tables)
        backward.add_elementwise("add", local_elements, tables)
    if model.embedding_layernorm:
        forward.add_elementwise(_norm(config), local_elements)
        backward.add_elementwise(f"{_norm(config)}_backward", local_elements)
    if model.dropout:
        forward.add_elementwise("dropout", local_elements)
        backward.add_elementwise("add", local_elements)
    size = ITEM_BYTES[config.training.dtype] * elements
    if t > 1 and config.layout.sequence_parallel:
        forward.add_message(REDUCE_SCATTER, size)
        backward.add_message(ALL_GATHER, size)
    elif t > 1:
        forward.add_message(_all_reduce_name(config), size)


def _head(config: RunConfig, forward: Tally, backward: Tally) -> None:
    """Counts logits and loss, whose gradients are computed in the forward pass."""
    model, t = config.model, config.layout.tp
    is_grid = model.is_grid_classifier
    tokens, h, columns = config.training.micro_batch * model.seq_len, model.hidden, config.padded_outputs // t
    elements = _tokens_between_layers(config) * h
    forward.add_elementwise(_norm(config), elements)
    backward.add_elementwise(f"{_norm(config)}_backward", elements)
    if is_grid:  # means over the cells of each grid, which have the logits, and their gradient for each cell
        forward.add_elementwise("add", elements)
        backward.add_elementwise("copy", elements)
        tokens = config.training.micro_batch
    for start in range(0, tokens, CHUNK_TOKENS):
        rows = min(CHUNK_TOKENS, tokens - start)
        forward.add_product(LINEAR, rows, h, columns)
        forward.add_product(INPUT, rows, columns, h)
        forward.add_product(WEIGHT, columns, rows, h)
        forward.add_elementwise("loss", rows * columns)
        if t > 1:
            forward.add_message(ALL_GATHER, 4 * (4 if is_grid else 3) * rows * t)
    if t > 1:
        size = ITEM_BYTES[config.training.dtype] * tokens * h
        if is_grid:
            forward.add_message(_all_reduce_name(config), size, 2 if config.layout.sequence_parallel else 1)
        elif config.layout.sequence_parallel:
            forward.add_message(ALL_GATHER, size)
            forward.add_message(REDUCE_SCATTER, size)
        else:
            forward.add_message(_all_reduce_name(config), size)
