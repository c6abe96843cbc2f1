"""Memory of a run of our own trainer by category, for a rank of each pipeline stage and for a node.

Categories, each in bytes of one rank:

* ``weights``: the flat parameters; with 16 bits also the float32 master weights that the rank updates
  (``layout/flat.py``, including gaps of alignment and the padding to equal shares).
* ``gradients``: the flat sums of gradients.
* ``optimiser``: both moments of the parameters that the rank updates: with ZeRO its share.
* ``copies``: copies for checkpoints that are written while training continues, and for the return from a loss spike;
  and of what ranks record, for ``training.trace_iterations``.
* ``activations``: saved tensors at the fullest moment of a step (``layout/memory.py``), including a layer that is being
  recomputed then.
* ``workspace``: temporary memory of a layer's backward pass, including the tiles of attention. Whether the run will
  have compiled kernels is not known, so the larger of attention with and without them counts, and of SwiGLU and rotary
  positions what PyTorch's operators need, which is more.
* ``logits``: temporary memory of the loss: logits of some hundred tokens, and tensors that are computed from them.
* ``communication``: sums that are sent in another type, messages between stages, and MPI's copies of sums in flight.
* ``allocator``: free blocks of the allocator, and of the pool of large tensors (``ops/tensor_pool.py``), that no tensor
  fits into. With the pool, on PyTorch 2.13 and glibc's heap, it was 0 to 0.17 of activations and workspace (1 to 30
  million parameters, 30 to 900 MiB of these), and 0.14 to 0.3 where all layers are recomputed, whose tensors come and
  go in another order. Without the pool it was 0.2 (98 million parameters, 600 MiB) to 0.7 (30 million on pipelines, 50
  to 90 MiB).
* ``base``: interpreter, PyTorch and MPI before there is a model (``machine/framework.py``).

Workspace and logits are needed one after the other, but free blocks of one may not fit the other, so the sum has both.
The page cache of the corpus's files is not counted, since the system can reclaim it. Neither are the tokens of
``training.eval_files``, 4 bytes of each on every rank, since their number is not known before they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Hashable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES, RunConfig
from fugaku_gpt.kernels.attention_tiling import (
    attention_elements,
    attention_tiling,
    enough_heads_for_threads,
    native_workspace_floats,
    partial_grad_floats,
)
from fugaku_gpt.kernels.matmul_tiling import MIN_DIMENSION, MIN_MULTIPLY_ADDS, cast_elements, gemm_workspace_bytes
from fugaku_gpt.layout.communications import CHUNK_TOKENS
from fugaku_gpt.layout.flat import flat_elements, is_sharded
from fugaku_gpt.layout.grid import strides_of
from fugaku_gpt.layout.memory import (
    ITEM_BYTES,
    PeakActivationBytes,
    core_bytes,
    freed_before_core,
    memory_shape,
    pipeline_states,
    recompute_of_layers,
)
from fugaku_gpt.layout.native_kernels import may_use_native_kernels
from fugaku_gpt.layout.stages import Chunk, chunks_by_stage, chunks_of
from fugaku_gpt.layout.trace_room import trace_room
from fugaku_gpt.machine.framework import Framework, framework_of
from fugaku_gpt.records.trace import CALL_INT64S, PHASE_INT64S

CATEGORIES = (
    "weights", "gradients", "optimiser", "copies", "activations", "workspace", "logits", "communication", "allocator",
    "base",
)  # fmt: skip
MIB = 2**20
_CACHED_ROWS = 16  # rows of logits for each thread: see ``parallel/cross_entropy.py``


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run.

    Attributes:
        stages: for each pipeline stage, category → bytes of one of its ranks.
        node: category → bytes of the fullest node.
        shared: bytes of a rank's base that all ranks of its node share.
    """

    stages: Tuple[Mapping[str, int], ...]
    node: Mapping[str, int]
    shared: int

    def bytes_of_stage(self, stage: int) -> int:
        """Bytes of one rank of a stage."""
        return sum(self.stages[stage].values())

    @property
    def peak_stage(self) -> int:
        """The stage whose ranks need the most memory; the first of equal ones."""
        return max(range(len(self.stages)), key=self.bytes_of_stage)

    @property
    def bytes_of_rank(self) -> int:
        """Bytes of a rank of the peak stage."""
        return self.bytes_of_stage(self.peak_stage)

    @property
    def bytes_of_node(self) -> int:
        """Bytes of the fullest node."""
        return sum(self.node.values())

    def bytes_of_ranks(self, stages: Sequence[int]) -> int:
        """Bytes of one node with a rank for each entry of ``stages``."""
        return sum(self.bytes_of_stage(stage) - self.shared for stage in stages) + self.shared


def memory_of_run(
    config: RunConfig, framework: Optional[Framework] = None, threads: Optional[int] = None, cores: int = 1
) -> RunMemory:
    """The memory of a run at its full batch and sequence length.

    Args:
        framework: memory of a rank before it has a model; default: that of the newest PyTorch that was measured.
        threads: threads of each rank; default: ``node.threads_per_rank``, or a rank's share of a node's ``cores``.

    Raises:
        UsageError: some stage does not fit ``training.recompute_budget_mib``.
    """
    base = framework if framework is not None else framework_of()
    threads = threads or config.node.threads_per_rank or max(1, cores // config.ranks_per_node)
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    peaks = PeakActivationBytes(config)
    trace = _trace_bytes(config)
    fixed: Dict[Hashable, Dict[str, int]] = {}  # a run may have a hundred thousand stages, but few kinds of them
    stages = []
    for stage, stage_chunks in enumerate(chunks_by_stage(chunks, config.layout.pp)):
        shape = memory_shape(stage_chunks, kinds)
        if shape not in fixed:
            fixed[shape] = _without_activations(config, stage_chunks, base, threads)
        by_category = fixed[shape].copy()
        by_category["copies"] += trace
        by_category["activations"] = peaks(stage_chunks, kinds, pipeline_states(config, stage))
        moving = by_category["activations"] + by_category["workspace"]
        is_recomputed = all(kinds[layer] == "full" for chunk in stage_chunks for layer in chunk.layers)
        by_category["allocator"] = _allocator_waste(moving, base.has_tensor_pool, is_recomputed)
        stages.append({name: by_category[name] for name in CATEGORIES})
    return RunMemory(tuple(stages), _fullest_node(config, stages, base.shared_bytes), base.shared_bytes)


def _without_activations(config: RunConfig, chunks: Sequence[Chunk], base: Framework, threads: int) -> Dict[str, int]:
    """Bytes by category of a rank with these chunks, without activations and the allocator's free blocks."""
    by_category = _lasting_bytes(config, chunks)
    by_category["workspace"] = _layer_workspace(config, threads)
    by_category["logits"] = _logit_bytes(config, threads) if any(chunk.has_head for chunk in chunks) else 0
    by_category["communication"] = _communication_bytes(config, chunks)
    narrow = base.sixteen_bit_bytes if config.training.dtype in SIXTEEN_BIT_DTYPES else 0
    panels = _packed_panel_bytes(config, threads) if base.has_native_matmul else 0
    # products of layers are ours, or those of oneDNN
    by_category["base"] = base.private_bytes + base.shared_bytes + max(narrow, panels)
    return by_category


def _allocator_waste(moving: int, has_tensor_pool: bool, is_recomputed: bool) -> int:
    """Free bytes of the allocator, from the temporary bytes of a step; fitted to the layouts of
    ``benchmarks/planned.py`` and to micro-batches of 1 to 256 of the preset ``tiny``."""
    if not has_tensor_pool:
        return int(min(moving, 0.2 * moving + 40 * MIB))
    return int(0.25 * moving if is_recomputed else min(moving, 0.1 * moving + 4 * MIB))


def _lasting_bytes(config: RunConfig, chunks: Sequence[Chunk]) -> Dict[str, int]:
    """Bytes by category that persist from step to step."""
    training, layout = config.training, config.layout
    elements = flat_elements(config, chunks)
    item = ITEM_BYTES[training.dtype]
    wide = max(item, 4)
    owned = elements // layout.dp if is_sharded(config) else elements
    masters = owned * wide if training.dtype in SIXTEEN_BIT_DTYPES else 0
    copy = 3 * owned * wide  # the updated parameters and both moments
    copies = 0
    if training.rollback_every is not None:
        copies += copy
    if config.checkpoint.interval is not None and config.checkpoint.asynchronous:
        written = copy + copies  # replicas divide the writing of identical tensors
        copies += written if is_sharded(config) else written // layout.dp
    return {
        "weights": elements * item + masters,
        "gradients": elements * wide,
        "optimiser": 2 * owned * wide,
        "copies": copies,
    }


def _trace_bytes(config: RunConfig) -> int:
    """Bytes in which a rank keeps its trace, those of the stage with the most records; 0 if nothing is traced."""
    traced = config.training.traced
    if traced is None:
        return 0
    last = config.layout.pp - 1
    rooms = [trace_room(config, stage, traced[1] - traced[0] + 1) for stage in {0, min(1, last), last // 2, last}]
    return 8 * max(calls * CALL_INT64S + phases * PHASE_INT64S for calls, phases in rooms)


def _layer_workspace(config: RunConfig, threads: int) -> int:
    """Peak temporary bytes of a layer's backward pass.

    The peak is in the MLP, where GELU or SwiGLU is recomputed and its result and the gradients on both sides of it
    exist, or where the norm before the MLP is; or in attention, after the MLP's tensors are freed.
    """
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    is_split = config.layout.sequence_parallel and t > 1
    r = s // t if is_split else s
    item, narrow = ITEM_BYTES[config.training.dtype], config.training.dtype in SIXTEEN_BIT_DTYPES
    stream = b * r * model.hidden
    # for a tensor-parallel layer: its full input or gradient, and a partial sum
    gathered = 2 * b * s * model.hidden if is_split else 0
    inner, made = b * s * model.ffn_size // t, b * s * model.up_width // t
    mlp = max(2 * inner + made + stream, made + 3 * stream) + gathered
    if model.mlp == "swiglu":  # PyTorch's operators make two more tensors; in 16 bits five, in float32
        mlp += 5 * inner * 4 // item if narrow else 2 * inner
    heads, has_dropout = model.heads // t, model.attention_dropout > 0
    kv_heads = model.local_kv_heads(t)
    sharing = heads // kv_heads
    tiling = attention_tiling(s, b, kv_heads, narrow, threads, sharing)
    freed = freed_before_core(config, False) // item
    inside = attention_elements(tiling, s, model.head_size, has_dropout) - freed
    if may_use_native_kernels(config) and enough_heads_for_threads(b, heads, threads):
        floats = threads * native_workspace_floats(s, model.head_size)
        floats += partial_grad_floats(b, heads, s, model.head_size) if sharing > 1 else 0
        compiled = floats * 4 // item
        inside = max(inside, compiled - freed_before_core(config, True) // item)
    if model.qk_norm or model.positions == "rope" or model.kv_head_count != model.heads:
        # once attention's own memory is free: gradients before they were packed, those of keys and values once more
        # beside each other; in 16 bits PyTorch's operators rotate in float32
        packed = (heads + 3 * kv_heads) * model.head_size * b * s
        inside = max(inside, packed * (1 + (4 // item if narrow else 0)) - freed)
    attention = max(0, inside + b * s * (model.local_qkv_width(t) + model.query_width // t) + 2 * stream + gathered)
    drawn = 3 * core_bytes(config)  # 16 bits of random numbers for each flag, and the comparison
    f, h, q = model.ffn_size // t, model.hidden, model.query_width
    # weights, whose gradients are added to sums
    matrices = ((model.local_qkv_width(t), h), (h, q // t), (model.up_width // t, h), (h, f))
    product = max(_accumulation_bytes(rows, columns, item) for rows, columns in matrices) if narrow else 0
    return item * max(mlp, attention) + product + drawn


def _packed_panel_bytes(config: RunConfig, threads: int) -> int:
    """Bytes of packed panels in our compiled kernels; 0 if no product is large enough for them."""
    model, t = config.model, config.layout.tp
    tokens, h = config.training.micro_batch * model.seq_len, model.hidden
    widest = max(model.local_qkv_width(t), model.up_width // t, config.padded_outputs // t)
    if config.node.compiled_products == "off" or not may_use_native_kernels(config):
        return 0
    if min(tokens, h) < MIN_DIMENSION or tokens * h * widest < MIN_MULTIPLY_ADDS:
        return 0
    return gemm_workspace_bytes(widest, h if config.training.dtype in SIXTEEN_BIT_DTYPES else 0, threads)


def _accumulation_bytes(rows: int, columns: int, item: int) -> int:
    """Temporary bytes of a 16-bit product that is added to a sum in float32.

    They include the copy that PyTorch's addition makes and our own kernel does not. If the build has no kernel for
    16-bit products, both factors are cast to float32 instead, which is not counted.
    """
    return cast_elements(rows, columns) * (item + 4)


def _logit_bytes(config: RunConfig, threads: int) -> int:
    """Temporary bytes of the loss."""
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    item = ITEM_BYTES[config.training.dtype]
    rows = min(CHUNK_TOKENS, b if model.is_grid_classifier else b * s)
    width = config.padded_outputs // t
    total = rows * width * item
    if config.training.dtype in SIXTEEN_BIT_DTYPES:
        total += min(rows, _CACHED_ROWS * threads if t == 1 else rows) * width * 4  # exponentials
        total += _accumulation_bytes(width, model.hidden, item)
    if model.is_grid_classifier and item == 2:  # the mean over cells in float32, and its gradient
        total += 2 * b * s * model.hidden * 4
    if config.layout.sequence_parallel and t > 1:  # gathered hidden states and their gradient
        total += 2 * b * s * model.hidden * item
    return total


def _communication_bytes(config: RunConfig, chunks: Sequence[Chunk]) -> int:
    """Bytes of messages and sums in flight."""
    model, layout, training = config.model, config.layout, config.training
    item = ITEM_BYTES[training.dtype]
    wide = max(item, 4)
    elements = flat_elements(config, chunks)
    total = 0
    if layout.dp > 1:
        sum_bytes = 2 if training.gradient_dtype in SIXTEEN_BIT_DTYPES else wide
        if sum_bytes != wide:
            total += elements * sum_bytes
        # MPI copies its input, for sharded sums a share of it (measured: 33 and 12 MiB of 32, two replicas)
        buckets = training.buckets_at_once
        if is_sharded(config):
            buckets = max(1, buckets // layout.dp)
        total += min(elements * sum_bytes, buckets * int(training.bucket_mib * MIB))
    has_tied = model.tied_embeddings and any(chunk.has_embedding or chunk.has_head for chunk in chunks)
    if layout.pp > 1 and has_tied:  # the tied gradient's copy
        total += config.padded_vocab // layout.tp * model.hidden * wide // (layout.dp if is_sharded(config) else 1)
    if layout.pp > 1:
        r = model.seq_len // layout.tp if layout.sequence_parallel else model.seq_len
        neighbours = len({side for chunk in chunks for side in _sides(chunk)})
        # for each neighbour: a received message that waits for its use, and one that is being sent
        total += 2 * neighbours * item * training.micro_batch * r * model.hidden
    return total


def _sides(chunk: Chunk) -> List[str]:
    return ([] if chunk.has_embedding else ["before"]) + ([] if chunk.has_head else ["after"])


def _fullest_node(config: RunConfig, stages: Sequence[Mapping[str, int]], shared: int) -> Dict[str, int]:
    """Bytes by category of the node that needs most.

    Ranks fill one node after the other, or are distributed round-robin if ``job.rank_map`` is bynode.
    """
    layout = config.layout
    stride, by_node = strides_of(layout, layout.order)["pp"], config.job.rank_map.startswith("bynode")
    sizes = [sum(stage.values()) for stage in stages]
    nodes = _stages_of_nodes(layout.ranks, config.ranks_per_node, stride, layout.pp, by_node)
    fullest = max(nodes, key=lambda node: sum(sizes[stage] for stage in node))
    by_category = {name: sum(stages[stage][name] for stage in fullest) for name in CATEGORIES}
    by_category["base"] -= (len(fullest) - 1) * shared
    return by_category


@lru_cache(maxsize=256)
def _stages_of_nodes(ranks: int, per_node: int, stride: int, pp: int, by_node: bool) -> List[Tuple[int, ...]]:
    """The stages of a node's ranks, for every node that differs from those before it.

    Args:
        per_node: ranks per node, a divisor of ``ranks``.
        stride: number of consecutive ranks of a stage.
    """
    nodes, period = ranks // per_node, stride * pp
    first, step = (1, nodes) if by_node else (per_node, 1)  # from node to node, and from rank to rank on a node
    distinct_nodes = min(nodes, period // math.gcd(first, period))
    return list(
        dict.fromkeys(
            tuple((node * first + local_rank * step) // stride % pp for local_rank in range(per_node))
            for node in range(distinct_nodes)
        )
    )
