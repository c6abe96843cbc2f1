"""Computes the bytes of activations that forward passes keep for backward passes, and how much of them a stage must
recompute to fit.

The formulas count what this implementation keeps, tensor by tensor, as Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models", section 4) do for theirs; a test holds them equal to the tensors that
PyTorch really saves. b sequences of s tokens in a micro-batch, h hidden, q width of all query heads (h of a GPT-2), f
width of the MLP, u of what its first product makes (f, or 2 f with SwiGLU), a heads, t tensor-parallel ranks; with
sequence parallelism r = s / t tokens of each sequence are here between the cut layers, otherwise r = s. An operator
that this PyTorch computes in float32 for lack of a good kernel in 16 bits (``compat``) keeps no copies.

What an operation needs while it runs is not counted here: see ``planner/trainer/run_memory.py``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import (
    AbstractSet,
    Dict,
    FrozenSet,
    Hashable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.native_kernels import may_use_native_kernels
from fugaku_gpt.layout.schedules import BackwardWeight, Forward, stage_order
from fugaku_gpt.layout.stages import Chunk, chunks_by_stage

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_ID_BYTES = 8
PREFILL_TOKENS = 1024  # of prompts that `generate` reads at once; more only of a single prompt
_MIB = 2.0**20

# for each chunk: micro-batches in flight, and deferred weight gradients; then the chunk in its backward pass
PipelineState = Tuple[Tuple[int, ...], Tuple[int, ...], Optional[int]]
RecomputeKinds = Union[Sequence[str], Mapping[int, str]]  # layer → ``none``, ``selective`` or ``full``


def layer_bytes(config: RunConfig, kind: str) -> int:
    """Bytes that one layer keeps of one micro-batch on one rank, its input included.

    Elements, without recomputing:

    * between the cut layers, b r h each: the layer's input, the residual after attention, and the masks of the two
      dropouts where there is dropout;
    * in the cut layers: queries and the attention's output, b s q / t each; keys and values, b s k each for the width k
      of the heads that this rank holds: with more ranks than heads of keys, one head, of which others have copies; the
      MLP's inner activations before GELU or SwiGLU, b s u / t. Norms, GELU and SwiGLU are done again;
    * what the norms of queries and keys keep (:func:`_head_norm_bytes`);
    * the flags of attention dropout (:func:`core_bytes`), which ``selective`` does not keep. ``full`` keeps the input
      alone;
    * where compiled kernels may compute attention, the logarithms of its sums: 4 bytes for each token and head.

    Args:
        kind: ``none``, ``selective`` or ``full``.
    """
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    r = s // t if config.layout.sequence_parallel else s
    item = ITEM_BYTES[config.training.dtype]
    if kind == "full":
        return item * b * r * model.hidden
    between = b * r * model.hidden * (4 if model.dropout else 2)
    inside = b * s * (model.local_qkv_width(t) + (model.query_width + model.up_width) // t)
    log_sums = 4 * b * s * model.heads // t if may_use_native_kernels(config) else 0
    kept = item * (between + inside) + _head_norm_bytes(config) + log_sums
    return kept + (core_bytes(config) if kind == "none" else 0)


def _head_norm_bytes(config: RunConfig) -> int:
    """Bytes that the norms of queries and keys keep: what the product has made, values included; a number for each
    token and head; in 16 bits their weights in float32."""
    model, t = config.model, config.layout.tp
    if not model.qk_norm:
        return 0
    tokens, item = config.training.micro_batch * model.seq_len, ITEM_BYTES[config.training.dtype]
    numbers = max(item, 4) * tokens * (model.heads // t + model.local_kv_heads(t))
    return item * tokens * model.local_qkv_width(t) + numbers + (2 * 4 * model.head_size if item == 2 else 0)


def _norm_bytes(config: RunConfig) -> int:
    """Bytes that a norm keeps besides its input. A LayerNorm: mean and deviation of each token; in 16 bits, where it
    recomputes them, its weight and bias in float32. Native kernels for 16 bits keep the statistics and the weight; the
    larger size counts. An RMSNorm: a number for each token, and in 16 bits its weight in float32."""
    model, t = config.model, config.layout.tp
    item = ITEM_BYTES[config.training.dtype]
    r = model.seq_len // t if config.layout.sequence_parallel else model.seq_len
    of_tokens = 2 * max(item, 4) * config.training.micro_batch * r
    if model.norm == "rmsnorm":
        return of_tokens // 2 + (4 * model.hidden if item == 2 else 0)
    if item > 2:
        return of_tokens
    return max(2 * 4 * model.hidden, 4 * model.hidden + of_tokens if may_use_native_kernels(config) else 0)


def core_bytes(config: RunConfig) -> int:
    """Bytes that the attention core of one layer keeps of one micro-batch between its inputs and its output.

    The probabilities are computed again; with dropout one byte says of each whether it is kept, b a s s / t bytes.
    """
    model, b = config.model, config.training.micro_batch
    if model.attention_dropout == 0.0:
        return 0
    return b * model.heads // config.layout.tp * model.seq_len**2


def freed_before_core(config: RunConfig, compiled: bool) -> int:
    """Bytes that the backward pass of a layer has freed when it reaches the attention core: everything after the core,
    except its output if native kernels need it."""
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    r = s // t if config.layout.sequence_parallel else s
    between = b * r * model.hidden * (3 if model.dropout else 1)
    inside = b * s * ((0 if compiled else model.query_width) + model.up_width) // t
    return ITEM_BYTES[config.training.dtype] * (between + inside)


def deferred_weight_grad_bytes(config: RunConfig) -> int:
    """Bytes that deferred gradients of one layer's weights need for one micro-batch: inputs and output gradients of the
    four tensor-parallel layers.

    With sequence parallelism, tensors that are gathered for this stay gathered.
    """
    model, t = config.model, config.layout.tp
    tokens = config.training.micro_batch * model.seq_len
    return _deferred_before_core(config) + ITEM_BYTES[config.training.dtype] * tokens * (
        model.hidden + model.local_qkv_width(t)
    )


def _deferred_before_core(config: RunConfig) -> int:
    """The part of :func:`deferred_weight_grad_bytes` that exists when the backward pass reaches the attention core:
    that of all tensor-parallel layers but the first."""
    model, t = config.model, config.layout.tp
    tokens = config.training.micro_batch * model.seq_len
    inside = (model.query_width + model.up_width + model.ffn_size) // t
    return ITEM_BYTES[config.training.dtype] * tokens * (3 * model.hidden + inside)


def embedding_and_head_bytes(config: RunConfig, chunk: Chunk) -> int:
    """Bytes that a chunk keeps of one micro-batch besides its layers.

    * Output, b r h, until its backward pass; of the last chunk the input of the last norm.
    * Embedding: the token ids, and b s flags where the table is cut; the mask of dropout; and where there is a
      LayerNorm, its input and what :func:`_norm_bytes` says.
    * Head: of the norm what :func:`_norm_bytes` says, and the gradient of the hidden states, which the
      cross-entropy has made already; that of the embedding it has added to the sums of gradients.
    * Of documents that begin at position 0 each: the positions, where these are learned.
    * Of grids: rows and columns of the cells where positions are learned; in the head which cells are no padding, how
      many these are, and the gradient of the means over them.
    """
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    r = s // t if config.layout.sequence_parallel else s
    item = ITEM_BYTES[config.training.dtype]
    total = item * b * r * model.hidden
    if chunk.has_embedding:
        total += b * s * (TOKEN_ID_BYTES + (1 if t > 1 else 0))
        total += item * b * r * model.hidden * (1 if model.dropout else 0)
        total += item * b * r * model.hidden + _norm_bytes(config) if model.embedding_layernorm else 0
        total += 2 * 8 * b * r if model.is_grid_classifier and model.positions == "learned" else 0
        total += 8 * b * r if config.data.reset_positions and model.positions == "learned" else 0
    if chunk.has_head:
        of_means = item * b * model.hidden + max(item, 4) * b * (r + 1)
        total += of_means if model.is_grid_classifier else item * b * r * model.hidden
        total += _norm_bytes(config)
    return total


def packing_bytes(config: RunConfig) -> int:
    """Bytes that a chunk's layers share of one micro-batch of grids, or of documents that are apart: the keys that each
    cell or token sees, two numbers of 4 bytes, and where positions are rotary and its own, cosines and sines of each;
    0 for another decoder."""
    model = config.model
    if not (model.is_grid_classifier or config.data.document_mask):
        return 0
    has_angles = model.positions == "rope" and (model.is_grid_classifier or config.data.reset_positions)
    angles = max(ITEM_BYTES[config.training.dtype], 4) * model.head_size if has_angles else 0
    return config.training.micro_batch * model.seq_len * (2 * 4 + angles)


def recompute_of_layers(config: RunConfig, chunks: Sequence[Chunk]) -> Tuple[str, ...]:
    """``none``, ``selective`` or ``full`` for each layer of the model.

    With ``training.recompute_budget_mib`` every stage gets the least that fits: first the flags of attention dropout
    of more and more layers, which are made again without a product, then whole layers. The first layers of each chunk
    come first; which they are makes no difference.

    Raises:
        UsageError: some stage does not fit into the budget whatever it recomputes; says the smallest one that would do.
    """
    training = config.training
    kinds = ["none"] * config.model.layers
    if training.recompute_budget_mib is None:
        first = training.recompute_layers
        for chunk in chunks:
            for layer in chunk.layers if first is None else chunk.layers[:first]:
                kinds[layer] = training.recompute
        return tuple(kinds)
    budget = training.recompute_budget_mib * _MIB
    smallest: Dict[int, float] = {}
    peaks = PeakActivationBytes(config)
    for stage, stage_chunks in enumerate(chunks_by_stage(chunks, config.layout.pp)):
        states = pipeline_states(config, stage)
        for plan in _recompute_plans(config, stage_chunks):
            peak = peaks(stage_chunks, plan, states)
            smallest[stage] = min(peak, smallest.get(stage, math.inf))
            if peak <= budget:
                for layer, kind in plan.items():
                    kinds[layer] = kind
                break
    worst = max(smallest, key=lambda stage: smallest[stage])
    if smallest[worst] > budget:
        needed = math.ceil(smallest[worst] / _MIB * 10) / 10
        raise UsageError(
            f"training.recompute_budget_mib: {training.recompute_budget_mib:g}: stage {worst} keeps {needed:g} MiB for "
            f"its backward passes with training.recompute {training.recompute}; valid: {needed:g} or more"
            + (", or recompute full" if training.recompute == "selective" else "")
            + ", or a smaller training.micro_batch"
        )
    return tuple(kinds)


def peak_activation_bytes(
    config: RunConfig, chunks: Sequence[Chunk], kinds: RecomputeKinds, states: AbstractSet[PipelineState]
) -> int:
    """The most bytes that a stage keeps at any time of a step, including what a layer needs while it is recomputed.

    Args:
        chunks: the stage's, in order.
        kinds: of each of its layers.
        states: see :func:`pipeline_states`.
    """
    return PeakActivationBytes(config)(chunks, kinds, states)


class PeakActivationBytes:
    """Computes :func:`peak_activation_bytes` for a run of many stages: equal chunks are counted once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._sizes: Dict[object, Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]]] = {}

    def __call__(self, chunks: Sequence[Chunk], kinds: RecomputeKinds, states: AbstractSet[PipelineState]) -> int:
        """Compute the same as :func:`peak_activation_bytes`."""
        defers_weight_grads = any(any(deferred) for _, deferred, _ in states)
        key = (defers_weight_grads, memory_shape(chunks, kinds))
        if key not in self._sizes:
            in_flight_bytes, deferred_bytes, backward_bytes = zip(
                *_chunk_sizes(self._config, chunks, kinds, defers_weight_grads)
            )
            self._sizes[key] = in_flight_bytes, deferred_bytes, backward_bytes
        in_flight_bytes, deferred_bytes, backward_bytes = self._sizes[key]
        return max(
            sum(count * size for count, size in zip((*counts, *deferred), (*in_flight_bytes, *deferred_bytes)))
            + (backward_bytes[backward] if backward is not None else 0)
            for counts, deferred, backward in states
        )


def memory_shape(chunks: Sequence[Chunk], kinds: RecomputeKinds) -> Hashable:
    """A key that is equal for stages whose chunks keep the same amount.

    Args:
        kinds: of each of their layers.
    """
    return tuple((chunk.has_embedding, chunk.has_head, *(kinds[layer] for layer in chunk.layers)) for chunk in chunks)


def _chunk_sizes(
    config: RunConfig, chunks: Sequence[Chunk], kinds: RecomputeKinds, defers_weight_grads: bool
) -> List[Tuple[int, int, int]]:
    """Three sizes in bytes for each chunk: activations of a micro-batch after its forward pass, tensors for its
    deferred weight gradients, and what its backward pass needs above that.

    Args:
        kinds: of each of its layers.
        defers_weight_grads: whether the stage puts gradients of weights off.
    """
    all_kinds = {kinds[layer] for chunk in chunks for layer in chunk.layers} | {"none"}
    bytes_of_kind = {kind: layer_bytes(config, kind) for kind in all_kinds}
    deferred, before_core = 0, -freed_before_core(config, may_use_native_kernels(config))
    if defers_weight_grads:
        deferred, before_core = deferred_weight_grad_bytes(config), before_core + _deferred_before_core(config)
    # more than is kept: at the start of the layer's backward pass, or at its attention core, whose flags are there then
    recompute_bytes = {kind: bytes_of_kind["none"] - size + before_core for kind, size in bytes_of_kind.items()}
    if "full" in recompute_bytes:
        recompute_bytes["full"] = max(recompute_bytes["full"], bytes_of_kind["none"] - bytes_of_kind["full"])
    sizes = []
    for chunk in chunks:
        in_flight = embedding_and_head_bytes(config, chunk) + sum(bytes_of_kind[kinds[layer]] for layer in chunk.layers)
        in_flight += packing_bytes(config)
        freed, highest = 0, 0  # the backward pass frees later layers before it recomputes an earlier one
        for layer in reversed(chunk.layers):
            highest = max(highest, recompute_bytes[kinds[layer]] - freed)
            freed += bytes_of_kind[kinds[layer]] - deferred
        sizes.append((in_flight, deferred * len(chunk.layers), highest))
    return sizes


def pipeline_states(config: RunConfig, stage: int) -> FrozenSet[PipelineState]:
    """The states of a stage during a step: for each of its chunks, the number of micro-batches in flight and of
    deferred weight gradients, and the chunk in its backward pass (by its index on the stage), if any. With one chunk
    and nothing deferred, only the fullest state."""
    layout = config.layout
    return _pipeline_states(layout.schedule, stage, layout.pp, config.micro_batches, layout.chunks)


@lru_cache(maxsize=1024)
def _pipeline_states(kind: str, stage: int, stages: int, micro_batches: int, chunks: int) -> FrozenSet[PipelineState]:
    if chunks == 1 and (kind != "zero_bubble" or stage == 0):  # the first stage puts nothing off
        most = micro_batches if kind == "gpipe" else min(micro_batches, stages - stage)
        return frozenset({((most,), (0,), None), ((most,), (0,), 0)})
    counts, deferred = [0] * chunks, [0] * chunks
    states: Set[PipelineState] = set()
    order = stage_order(kind, stage, stages, micro_batches, chunks)
    defers_weight_grads = any(isinstance(step, BackwardWeight) for step in order)
    for step in order:
        local_chunk = step.chunk // stages
        if isinstance(step, Forward):
            counts[local_chunk] += 1
        elif isinstance(step, BackwardWeight):
            deferred[local_chunk] -= 1
        else:
            states.add((tuple(counts), tuple(deferred), local_chunk))
            counts[local_chunk] -= 1
            deferred[local_chunk] += defers_weight_grads
        states.add((tuple(counts), tuple(deferred), None))
    return frozenset(states)


def _recompute_plans(config: RunConfig, chunks: Sequence[Chunk]) -> Iterator[Dict[int, str]]:
    """Yields what to recompute in a stage's layers, from nothing to the most that is allowed."""
    longest = max(len(chunk.layers) for chunk in chunks)
    steps: List[Tuple[int, int]] = [(0, 0)]  # of each chunk: how many layers whole, how many of the next the flags
    if config.model.attention_dropout:  # there are none otherwise
        steps += [(0, count) for count in range(1, longest + 1)]
    if config.training.recompute == "full":
        steps += [(count, longest - count if config.model.attention_dropout else 0) for count in range(1, longest + 1)]
    for full, selective in steps:
        yield {
            layer: "full" if index < full else "selective" if index < full + selective else "none"
            for chunk in chunks
            for index, layer in enumerate(chunk.layers)
        }
