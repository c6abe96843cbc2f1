"""Memory of a run of our own trainer, by what it is for, on a rank of each pipeline stage and on a node.

Categories, each in bytes of one rank:

* ``weights``: the flat parameters; with 16 bits also the float32 masters of what the rank steps (``layout/flat.py``,
  gaps of alignment and the padding to equal shares included).
* ``gradients``: their flat sums.
* ``optimiser``: both moments of what the rank steps: with ZeRO its share.
* ``copies``: for checkpoints that are written while training goes on, and to which a loss spike returns.
* ``activations``: what forward passes keep at the fullest moment of a step (``layout/memory.py``), a layer that is
  recomputed then included.
* ``workspace``: what the operations of a layer's backward pass need while they run, attention's blocks among it.
  Whether there will be compiled kernels is not known: of attention with and without them, what needs more.
* ``logits``: what the loss needs while it runs: logits of some hundred tokens, and what they are made to.
* ``communication``: sums that travel in another type, messages between stages, and what MPI holds of sums on their way.
* ``allocator``: blocks that the allocator keeps and nothing fits into. With PyTorch 2.13 it was 0.2 of activations and
  workspace (98 million parameters, 600 MiB of these) to 0.7 (30 million on pipelines, 50 to 90 MiB). Where large
  tensors are in blocks (``ops/tensor_pool.py``) it is less: of 124 million next to nothing, others were not measured.
* ``base``: interpreter, PyTorch and MPI before there is a model (``machine/framework.py``).

Workspace and logits are needed one after the other, and memory that the allocator keeps of one may not fit the other:
the sum takes both. What the corpus's files take is the system's to give and take back, and is not counted.
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
)
from fugaku_gpt.kernels.matmul_tiling import MIN_DIMENSION, MIN_MULTIPLY_ADDS, cast_elements, panel_bytes
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
from fugaku_gpt.layout.sequence import CHUNK_TOKENS
from fugaku_gpt.layout.stages import Chunk, chunks_by_stage, chunks_of
from fugaku_gpt.machine.framework import Framework, framework_of

CATEGORIES = (
    "weights", "gradients", "optimiser", "copies", "activations", "workspace", "logits", "communication", "allocator",
    "base",
)  # fmt: skip
MIB = 2**20
_CACHED_ROWS = 16  # of logits, for each thread: see ``parallel/cross_entropy.py``


@dataclass(frozen=True)
class RunMemory:
    """What a run needs.

    Attributes:
        stages: of each pipeline stage, category → bytes of one of its ranks.
        node: the same of the fullest node.
        shared: bytes of a rank's base that all ranks of its node use together.
    """

    stages: Tuple[Mapping[str, int], ...]
    node: Mapping[str, int]
    shared: int

    def bytes_of_stage(self, stage: int) -> int:
        """Of one rank."""
        return sum(self.stages[stage].values())

    @property
    def peak_stage(self) -> int:
        """The stage whose ranks need most; of equal ones the first."""
        return max(range(len(self.stages)), key=self.bytes_of_stage)

    @property
    def bytes_of_rank(self) -> int:
        """Of a rank of that stage."""
        return self.bytes_of_stage(self.peak_stage)

    @property
    def bytes_of_node(self) -> int:
        """Of the fullest node."""
        return sum(self.node.values())

    def bytes_of_ranks(self, stages: Sequence[int]) -> int:
        """Of ranks of some stages together on one node."""
        return sum(self.bytes_of_stage(stage) - self.shared for stage in stages) + self.shared


def memory_of_run(
    config: RunConfig, framework: Optional[Framework] = None, threads: Optional[int] = None, cores: int = 1
) -> RunMemory:
    """The memory of a run at its full batch and sequence length.

    Args:
        framework: what a rank takes before it has a model; default: of the newest PyTorch that was measured.
        threads: of each rank; default: ``node.threads_per_rank``, or its share of ``cores``, those of a node.

    Raises:
        UsageError: some stage does not fit ``training.recompute_budget_mib``.
    """
    base = framework if framework is not None else framework_of()
    threads = threads or config.node.threads_per_rank or max(1, cores // config.ranks_per_node)
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    peaks = PeakActivationBytes(config)
    fixed: Dict[Hashable, Dict[str, int]] = {}  # a run may have a hundred thousand stages, but few kinds of them
    stages = []
    for stage, stage_chunks in enumerate(chunks_by_stage(chunks, config.layout.pp)):
        shape = memory_shape(stage_chunks, kinds)
        if shape not in fixed:
            fixed[shape] = _without_activations(config, stage_chunks, base, threads)
        by_category = fixed[shape].copy()
        by_category["activations"] = peaks(stage_chunks, kinds, pipeline_states(config, stage))
        by_category["allocator"] = _allocator_waste(by_category["activations"] + by_category["workspace"])
        stages.append({name: by_category[name] for name in CATEGORIES})
    return RunMemory(tuple(stages), _fullest_node(config, stages, base.shared_bytes), base.shared_bytes)


def _without_activations(config: RunConfig, chunks: Sequence[Chunk], base: Framework, threads: int) -> Dict[str, int]:
    """What a rank of a stage with these chunks needs, without activations and what the allocator keeps of them."""
    by_category = _lasting_bytes(config, chunks)
    by_category["workspace"] = _layer_workspace(config, threads)
    by_category["logits"] = _logit_bytes(config, threads) if any(chunk.has_head for chunk in chunks) else 0
    by_category["communication"] = _communication_bytes(config, chunks)
    narrow = base.sixteen_bit_bytes if config.training.dtype in SIXTEEN_BIT_DTYPES else 0
    by_category["base"] = base.private_bytes + base.shared_bytes + narrow + (_packed_panel_bytes(config, threads) if base.has_native_matmul else 0)
    return by_category


def _allocator_waste(moving: int) -> int:
    """Of memory that comes and goes in a step: pieces that lie between others. Fitted to ``benchmarks/planned.py``."""
    return int(min(moving, 0.2 * moving + 40 * MIB))


def _lasting_bytes(config: RunConfig, chunks: Sequence[Chunk]) -> Dict[str, int]:
    """What is there from step to step."""
    training, layout = config.training, config.layout
    elements = flat_elements(config, chunks)
    item = ITEM_BYTES[training.dtype]
    wide = max(item, 4)
    owned = elements // layout.dp if is_sharded(config) else elements
    masters = owned * wide if training.dtype in SIXTEEN_BIT_DTYPES else 0
    copy = 3 * owned * wide  # what is stepped, and both moments
    copies = 0
    if training.rollback_every is not None:
        copies += copy
    if config.checkpoint.interval is not None and config.checkpoint.asynchronous:
        written = copy + copies  # replicas share the writing of what they hold alike
        copies += written if is_sharded(config) else written // layout.dp
    return {
        "weights": elements * item + masters,
        "gradients": elements * wide,
        "optimiser": 2 * owned * wide,
        "copies": copies,
    }


def _layer_workspace(config: RunConfig, threads: int) -> int:
    """What a layer's backward pass needs beyond what it keeps, at its fullest: where GELU is done again, its result and
    the gradients behind and before it; where the LayerNorm before the MLP is; or in attention, where the MLP's are
    gone."""
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    cut = config.layout.sequence_parallel and t > 1
    r = s // t if cut else s
    item, narrow = ITEM_BYTES[config.training.dtype], config.training.dtype in SIXTEEN_BIT_DTYPES
    stream = b * r * model.hidden
    gathered = 2 * b * s * model.hidden if cut else 0  # of a cut layer: its input or gradient, whole, and a partial sum
    inner = b * s * model.ffn_size // t
    mlp = max(3 * inner + stream, inner + 3 * stream) + gathered
    heads, drops = model.heads // t, model.attention_dropout > 0
    blocks = attention_tiling(s, b, heads, narrow, threads)
    inside = attention_elements(blocks, s, model.head_size, drops) - freed_before_core(config, False) // item
    if may_use_native_kernels(config) and enough_heads_for_threads(b, heads, threads):
        compiled = threads * native_workspace_floats(s, model.head_size) * 4 // item
        inside = max(inside, compiled - freed_before_core(config, True) // item)
    attention = max(0, inside + 4 * b * s * model.hidden // t + 2 * stream + gathered)
    drawn = 3 * core_bytes(config)  # 16 bits of random numbers for each flag, and the comparison
    f, h = model.ffn_size // t, model.hidden
    matrices = ((3 * h // t, h), (h, h // t), (f, h), (h, f))  # of weights: their gradients are added to sums
    product = max(_accumulation_bytes(rows, columns, item) for rows, columns in matrices) if narrow else 0
    return item * max(mlp, attention) + product + drawn


def _packed_panel_bytes(config: RunConfig, threads: int) -> int:
    """What our compiled kernels keep for products, where a layer's or the logits are large enough for them."""
    model, t = config.model, config.layout.tp
    tokens, h = config.training.micro_batch * model.seq_len, model.hidden
    widest = max(3 * h // t, model.ffn_size // t, config.padded_vocab // t)
    if not may_use_native_kernels(config) or min(tokens, h) < MIN_DIMENSION or tokens * h * widest < MIN_MULTIPLY_ADDS:
        return 0
    return panel_bytes(widest, h if config.training.dtype in SIXTEEN_BIT_DTYPES else 0, threads)


def _accumulation_bytes(rows: int, columns: int, item: int) -> int:
    """Bytes of a product in 16 bits on its way to a sum in float32, with the copy that PyTorch's addition makes and our
    own kernel does not. Where the build has no kernel for 16-bit products,
    all of what is multiplied is cast to float32 instead: that is not counted."""
    return cast_elements(rows, columns) * (item + 4)


def _logit_bytes(config: RunConfig, threads: int) -> int:
    """What the loss needs while it runs."""
    model, t = config.model, config.layout.tp
    b, s = config.training.micro_batch, model.seq_len
    item = ITEM_BYTES[config.training.dtype]
    rows = min(CHUNK_TOKENS, b * s)
    width = config.padded_vocab // t
    total = rows * width * item
    if config.training.dtype in SIXTEEN_BIT_DTYPES:
        total += min(rows, _CACHED_ROWS * threads if t == 1 else rows) * width * 4  # exponentials
        total += _accumulation_bytes(width, model.hidden, item)
    if config.layout.sequence_parallel and t > 1:  # gathered hidden states and their gradient
        total += 2 * b * s * model.hidden * item
    return total


def _communication_bytes(config: RunConfig, chunks: Sequence[Chunk]) -> int:
    """What is on its way to others and from them."""
    model, layout, training = config.model, config.layout, config.training
    item = ITEM_BYTES[training.dtype]
    wide = max(item, 4)
    elements = flat_elements(config, chunks)
    total = 0
    if layout.dp > 1:
        travels = 2 if training.gradient_dtype in SIXTEEN_BIT_DTYPES else wide
        if travels != wide:
            total += elements * travels
        # MPI copies what it is handed, of sums that are shared out a share (seen: 33 and 12 MiB of 32, two replicas)
        buckets = training.buckets_at_once
        if is_sharded(config):
            buckets = max(1, buckets // layout.dp)
        total += min(elements * travels, buckets * int(training.bucket_mib * MIB))
    if layout.pp > 1 and any(chunk.has_embedding or chunk.has_head for chunk in chunks):  # the tied gradient's copy
        total += config.padded_vocab // layout.tp * model.hidden * wide // (layout.dp if is_sharded(config) else 1)
    if layout.pp > 1:
        r = model.seq_len // layout.tp if layout.sequence_parallel else model.seq_len
        neighbours = len({side for chunk in chunks for side in _sides(chunk)})
        # of each neighbour: a message that has come and waits for its use, and one that is leaving
        total += 2 * neighbours * item * training.micro_batch * r * model.hidden
    return total


def _sides(chunk: Chunk) -> List[str]:
    return ([] if chunk.has_embedding else ["before"]) + ([] if chunk.has_head else ["after"])


def _fullest_node(config: RunConfig, stages: Sequence[Mapping[str, int]], shared: int) -> Dict[str, int]:
    """Bytes by category of the node that needs most: ranks fill one node after the other, or go round with job.rank_map
    bynode."""
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
        per_node: ranks; divides ``ranks``: the config says so.
        stride: ranks of a stage that follow one another.
    """
    nodes, period = ranks // per_node, stride * pp
    first, step = (1, nodes) if by_node else (per_node, 1)  # from node to node, and from rank to rank on a node
    different = min(nodes, period // math.gcd(first, period))
    return list(
        dict.fromkeys(
            tuple((node * first + local_rank * step) // stride % pp for local_rank in range(per_node))
            for node in range(different)
        )
    )
