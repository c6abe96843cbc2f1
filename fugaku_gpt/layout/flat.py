"""Lays out a rank's tensors in its flat parameters and gradients, and cuts these into buckets for sums over replicas.

Order: first the tensors that are split over tensor-parallel ranks, in reverse order of their use in the forward pass,
which is the order in which the backward pass finishes their gradients; then the weights of keys and values of which
neighbouring tensor-parallel ranks have copies, whose gradients these sum before replicas do; then the replicated
tensors, whose gradients are summed over tensor-parallel ranks before replicas: the norms of queries and keys always,
the others under sequence parallelism; last a tied token embedding, whose gradient the last pipeline stage shares with
the first. The embedding has its own buckets, which both stages cut alike. Both stages add the results of the sums over
replicas: two terms, whose sum is bit-identical on both, in whatever order the MPI library reduced the replicas of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import List, Sequence, Tuple

from fugaku_gpt.config.schema import ModelConfig, RunConfig
from fugaku_gpt.layout.memory import ITEM_BYTES
from fugaku_gpt.layout.operations import MAX_ELEMENTS
from fugaku_gpt.layout.stages import Chunk, chunk_tensors, chunks_of, stage_tensors
from fugaku_gpt.layout.tensors import TensorSpec

ALIGNMENT_BYTES = 64  # a cache line, and a full 512-bit vector


@dataclass(frozen=True)
class PlacedTensor:
    """One tensor: elements [start, start + size) of the flat tensors."""

    spec: TensorSpec
    start: int
    size: int

    @property
    def span(self) -> slice:
        """The range of its elements."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class OptimizerShard:
    """A range of parameters whose optimiser step a rank does, where the sum of their gradients ends up, and which of
    all elements that the rank owns they are."""

    parameters: slice
    gradients: slice
    masters: slice


@dataclass(frozen=True)
class FlatLayout:
    """The flat tensors of a rank.

    Attributes:
        placed: the tensors in order; gaps between them are alignment.
        elements: in all; divides by the shards.
        buckets: consecutive ranges that are summed in one message each; each divides by the shards.
        copied: range of the tensors of which some tensor-parallel ranks hold copies (``TensorSpec.copies``).
        tp_replicated: range of the tensors that every tensor-parallel rank holds whole.
        tp_partial: range of those of them whose gradients tensor-parallel ranks have in parts (``TensorSpec``).
        embedding: range of the token embedding that two stages hold; empty where this stage has none.
    """

    placed: Tuple[PlacedTensor, ...]
    elements: int
    buckets: Tuple[slice, ...]
    copied: slice
    tp_replicated: slice
    tp_partial: slice
    embedding: slice

    def summed_over_tp(self, sequence_parallel: bool) -> slice:
        """Range of the tensors whose gradients tensor-parallel ranks add up: each has that of its own tokens under
        sequence parallelism, and of its own heads otherwise."""
        return self.tp_replicated if sequence_parallel else self.tp_partial

    def placed_within(self, first: int, stop: int) -> Sequence[PlacedTensor]:
        """The tensors that have elements in [first, stop), in order."""
        before = bisect_right(self._starts, first) - 1  # the tensor that begins at the first element or before it
        return self.placed[max(0, before) : bisect_left(self._starts, stop)]

    @cached_property
    def _starts(self) -> Tuple[int, ...]:
        return tuple(placed.start for placed in self.placed)

    def owned(self, shard: int, shards: int) -> List[OptimizerShard]:
        """The range that one of ``shards`` ranks owns in every bucket; with one shard, everything."""
        if shards == 1:
            everything = slice(0, self.elements)
            return [OptimizerShard(everything, everything, everything)]
        owned_ranges: List[OptimizerShard] = []
        before = 0
        for bucket in self.buckets:
            size = (bucket.stop - bucket.start) // shards
            first = bucket.start + shard * size
            owned_ranges.append(
                OptimizerShard(
                    slice(first, first + size),
                    slice(bucket.start, bucket.start + size),
                    slice(before, before + size),
                )
            )
            before += size
        return owned_ranges

    def tied(self, shards: int) -> List[slice]:
        """Ranges that hold the sum over replicas of this rank's share of the token embedding's gradient, or of all of
        it with one shard; empty if this stage has no embedding."""
        if self.embedding.start == self.embedding.stop:
            return []
        if shards == 1:
            return [self.embedding]
        own = [bucket for bucket in self.buckets if bucket.start >= self.embedding.start]
        return [slice(bucket.start, bucket.start + (bucket.stop - bucket.start) // shards) for bucket in own]


def is_sharded(config: RunConfig) -> bool:
    """Whether each replica stores and updates only its share (ZeRO)."""
    return config.layout.zero == 1 and config.layout.dp > 1


def shards_of(config: RunConfig) -> int:
    """Number of equal shards of each bucket of a run."""
    return config.layout.dp if is_sharded(config) or config.layout.hierarchical_sum else 1


@lru_cache(maxsize=64)
def flat_layout_of(config: RunConfig, stage: int) -> FlatLayout:
    """The layout of one stage of a run, which all of its ranks share."""
    specs = stage_tensors(config.model, config.layout.tp, chunks_of(config), stage)
    item = ITEM_BYTES[config.training.dtype]
    bucket_bytes = int(config.training.bucket_mib * 2**20)
    return flat_layout(specs, config.layout.tp, shards_of(config), item, max(item, 4), bucket_bytes)


def flat_layout(
    specs: Sequence[TensorSpec], tp: int, shards: int, item_bytes: int, sum_bytes: int, bucket_bytes: int
) -> FlatLayout:
    """The layout of a stage's tensors.

    Args:
        specs: in order of first use.
        shards: replicas that share out each bucket; 1 where none do.
        item_bytes: of one parameter.
        sum_bytes: of one gradient.
        bucket_bytes: of one sum at most; no bucket has more elements than a communication can.
    """
    step = ALIGNMENT_BYTES // item_bytes
    unit = step * shards
    placed: List[PlacedTensor] = []
    end, embedding_start = 0, None
    last_used_first = list(reversed(specs))
    for spec in sorted(last_used_first, key=_section_of):  # stable: within a kind the order stays
        if spec.is_tied:
            end = embedding_start = -(-end // unit) * unit
        size = math.prod(spec.local_shape(tp))
        placed.append(PlacedTensor(spec, end, size))
        end += -(-size // step) * step
    end = -(-end // unit) * unit
    width = max(1, min(bucket_bytes // sum_bytes, MAX_ELEMENTS) // unit) * unit
    cut = end if embedding_start is None else embedding_start
    buckets = [
        slice(start, min(start + width, stop))
        for first, stop in ((0, cut), (cut, end))
        for start in range(first, stop, width)
    ]
    copied = _span_of([tensor for tensor in placed if tensor.spec.copies > 1])
    tp_replicated = _span_of([tensor for tensor in placed if tensor.spec.tp_dim is None])
    tp_partial = _span_of([tensor for tensor in placed if tensor.spec.is_partial])
    embedding = _span_of([tensor for tensor in placed if tensor.spec.is_tied])
    return FlatLayout(tuple(placed), end, tuple(buckets), copied, tp_replicated, tp_partial, embedding)


def _span_of(tensors: Sequence[PlacedTensor]) -> slice:
    """The range of tensors that follow one another; empty without any."""
    return slice(tensors[0].start, tensors[-1].start + tensors[-1].size) if tensors else slice(0, 0)


def flat_elements(config: RunConfig, chunks: Sequence[Chunk]) -> int:
    """Number of elements that :func:`flat_layout_of` has for a stage of these chunks, without placing any tensor."""
    item, shards = ITEM_BYTES[config.training.dtype], shards_of(config)
    step = ALIGNMENT_BYTES // item
    layer, table, other_embeddings, head = _aligned_elements(config.model, config.layout.tp, step)
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    has_head = any(chunk.has_head for chunk in chunks)
    before = layer * sum(len(chunk.layers) for chunk in chunks)
    before += (other_embeddings if has_embedding else 0) + (head if has_head else 0)
    unit = step * shards
    aligned_end = -(-before // unit) * unit
    return aligned_end + (-(-table // unit) * unit if has_embedding or has_head else 0)


@lru_cache(maxsize=256)
def _aligned_elements(model: ModelConfig, tp: int, step: int) -> Tuple[int, int, int, int]:
    """Elements, with alignment gaps, of a layer, of the tied token embedding, of the other tensors at the start of the
    first chunk, and of the last norm with output weights of their own."""
    single_layer = Chunk(0, 0, range(1), True, True)
    layer = table = other_embeddings = head = 0
    for spec in chunk_tensors(replace(model, layers=1), tp, single_layer):
        size = -(-math.prod(spec.local_shape(tp)) // step) * step
        if spec.is_tied:
            table += size
        elif spec.name.startswith("blocks."):
            layer += size
        elif spec.name.startswith(("final_norm.", "output.")):
            head += size
        else:
            other_embeddings += size
    return layer, table, other_embeddings, head


def _section_of(spec: TensorSpec) -> int:
    if spec.is_tied:
        return 4
    if spec.tp_dim is not None:
        return 1 if spec.copies > 1 else 0
    return 2 if spec.is_partial else 3
