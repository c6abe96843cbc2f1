"""Determines which regions of which tensors a rank writes to a checkpoint and needs from one, from its coordinates.

All regions are in coordinates of the full tensors, as ``layout/tensors.py`` names them, without the padding of the
vocabulary, which depends on tensor parallelism and stays zero. So any layout can read what another has written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterator, List, Tuple

from fugaku_gpt.config.schema import ModelConfig, RunConfig
from fugaku_gpt.layout.flat import FlatLayout, flat_layout_of, is_sharded
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
    """Shape of each tensor in a checkpoint."""
    return {
        spec.name: spec.shape if spec.rows is None else (spec.rows, *spec.shape[1:]) for spec in model_tensors(model, 1)
    }


def tensor_region(spec: TensorSpec, tp: int, tp_rank: int) -> Region:
    """The region of a logical tensor that one tensor-parallel rank holds, without the padding of the vocabulary; where
    that is all it holds, the region is empty."""
    parts, shape = spec.slice_of(tp_rank, tp), list(spec.local_shape(tp))
    if spec.rows is not None:
        shape[0] = max(0, min(shape[0], spec.rows - parts[0].start))
    return Region(tuple(part.start for part in parts), tuple(shape))


def local_regions(layout: FlatLayout, tp: int, tp_rank: int, first: int, stop: int) -> Iterator[ShardRegion]:
    """The regions of logical tensors in elements [first, stop) of a rank's flat tensors, in order; gaps and padding
    have none."""
    for placed in layout.placed_within(first, stop):
        begin = max(first, placed.start)
        # rows are cut over tensor-parallel ranks, so padding is at the end of each part
        end = min(stop, placed.start + tensor_region(placed.spec, tp, tp_rank).size)
        if begin >= end:
            continue
        spec, at = placed.spec, begin
        corner = [part.start for part in spec.slice_of(tp_rank, tp)]
        for region in rectangles(corner, spec.local_shape(tp), begin - placed.start, end - placed.start):
            yield ShardRegion(spec.name, region, at)
            at += region.size


def regions_to_write(config: RunConfig, coordinates: Coordinates, shard: int) -> List[ShardRegion]:
    """The regions that a rank writes; all ranks of a layout together write each element of the model once.

    With ZeRO each replica writes what it owns; without it, replicas hold the same and each writes a share. Of what
    tensor-parallel ranks hold alike, the first of them writes; of the token embedding, the first stage.

    Args:
        shard: the rank's place among the replicas in the order of shares (``replicas.rank``).
    """
    tp, dp = config.layout.tp, config.layout.dp
    layout = flat_layout_of(config, coordinates.pp)
    if is_sharded(config):
        ranges = [owned.parameters for owned in layout.owned(shard, dp)]
    else:
        ranges = [slice(layout.elements * shard // dp, layout.elements * (shard + 1) // dp)]
    writes = {placed.spec.name for placed in layout.placed if is_first_holder(placed.spec, coordinates)}
    return [
        piece
        for owned_range in ranges
        for piece in local_regions(layout, tp, coordinates.tp, owned_range.start, owned_range.stop)
        if piece.name in writes
    ]


def is_first_holder(spec: TensorSpec, coordinates: Coordinates) -> bool:
    """Whether a rank is the first of those of its replica that hold the same part of a tensor: the one that counts it
    in norms, and writes it to checkpoints."""
    if spec.name == TOKEN_EMBEDDING and coordinates.pp != 0:
        return False
    return spec.is_first_copy(coordinates.tp)
