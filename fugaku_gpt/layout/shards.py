"""Which parts of which tensors a rank writes to a checkpoint, and which it needs from one: a function of its place.

All is said in coordinates of the whole tensors, as ``layout/tensors.py`` names them, without the padding of the
vocabulary: that depends on tensor parallelism, and stays zero. So what one layout has written, any other can read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, Iterator, List, Tuple

from fugaku_gpt.config.schema import ModelConfig, RunConfig
from fugaku_gpt.layout.flat import FlatLayout, PlacedTensor, flat_layout_of, is_sharded
from fugaku_gpt.layout.grid import Coordinates
from fugaku_gpt.layout.regions import Region, rectangles
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, TensorSpec, model_tensors


@dataclass(frozen=True)
class ShardRegion:
    """A rectangle of a logical tensor that is one run of a rank's flat tensors, from element ``first`` on."""

    name: str
    region: Region
    first: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.first + self.region.size


def logical_shapes(model: ModelConfig) -> Dict[str, Tuple[int, ...]]:
    """Shape of each tensor as a checkpoint knows it."""
    return {
        spec.name: spec.shape if spec.rows is None else (spec.rows, *spec.shape[1:]) for spec in model_tensors(model, 1)
    }


def local_regions(layout: FlatLayout, tp: int, tp_rank: int, first: int, stop: int) -> Iterator[ShardRegion]:
    """What elements [first, stop) of a rank's flat tensors are, in order; gaps and padding are nothing."""
    for placed in layout.placed:
        begin = max(first, placed.start)
        end = min(stop, placed.start + _unpadded_elements(placed, tp, tp_rank))
        if begin >= end:
            continue
        spec, at = placed.spec, begin
        corner = [part.start for part in spec.slice_of(tp_rank, tp)]
        for region in rectangles(corner, spec.local_shape(tp), begin - placed.start, end - placed.start):
            yield ShardRegion(spec.name, region, at)
            at += region.size


def regions_to_write(config: RunConfig, coordinates: Coordinates, shard: int) -> List[ShardRegion]:
    """What a rank writes; over all ranks of a layout that is each element of the model once.

    With ZeRO each replica writes what it owns; without, replicas hold the same, and each writes its share of it. What
    tensor-parallel ranks hold alike the first of them writes, and the token embedding the first stage.

    Args:
        shard: the rank's place among the replicas in the order of shares (``replicas.rank``).
    """
    tp, dp = config.layout.tp, config.layout.dp
    layout = flat_layout_of(config, coordinates.pp)
    if is_sharded(config):
        ranges = [owned.parameters for owned in layout.owned(shard, dp)]
    else:
        ranges = [slice(layout.elements * shard // dp, layout.elements * (shard + 1) // dp)]
    writes = {placed.spec.name for placed in layout.placed if _is_writer(placed.spec, coordinates)}
    return [
        piece
        for owned_range in ranges
        for piece in local_regions(layout, tp, coordinates.tp, owned_range.start, owned_range.stop)
        if piece.name in writes
    ]


def _is_writer(spec: TensorSpec, coordinates: Coordinates) -> bool:
    if spec.name == TOKEN_EMBEDDING and coordinates.pp != 0:
        return False
    return spec.tp_dim is not None or coordinates.tp == 0


def _unpadded_elements(placed: PlacedTensor, tp: int, tp_rank: int) -> int:
    """Elements of a rank's part of a tensor, counted from its beginning, that are no padding."""
    spec = placed.spec
    if spec.rows is None:
        return placed.size
    width = spec.local_shape(tp)[0]  # rows are cut over tensor-parallel ranks, so padding is at the end of each part
    return max(0, min(width, spec.rows - tp_rank * width)) * math.prod(spec.shape[1:])
