"""Saves checkpoints without a trainer: named arrays, distributed over ranks, through the package's own writer."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.checkpoint.data_file import Entry, describe_dtype, file_name, plan_file, write_pieces
from fugaku_gpt.checkpoint.directory import begin_checkpoint, commit_checkpoint, discard_temporary, update_tracker
from fugaku_gpt.checkpoint.manifest import LogicalTensor, Manifest, describe_file
from fugaku_gpt.checkpoint.safetensors import DTYPES
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.layout.regions import Region, full_region, rectangles
from fugaku_gpt.layout.shards import logical_shapes

Arrays = Mapping[str, Any]  # "kind/tensor" → array
Pieces = List[Tuple[str, Region]]  # one rank's pieces: ("kind/tensor", region)
KINDS = ("weights", "first_moment", "second_moment")
SHAPES: Dict[str, Tuple[int, ...]] = {"a.weight": (3, 4, 5), "a.bias": (7,), "b.weight": (6, 8), "scale": ()}


def some_arrays(
    seed: int, shapes: Mapping[str, Tuple[int, ...]] = SHAPES, dtype: str = "F32", kinds: Sequence[str] = KINDS
) -> Dict[str, Any]:
    """Random arrays of every kind."""
    rng = np.random.RandomState(seed)
    return {
        f"{kind}/{name}": np.asarray(rng.standard_normal(shape), DTYPES[dtype])
        for kind in kinds
        for name, shape in shapes.items()
    }


def save_model(directory: Path, model: ModelConfig, ranks: int = 3, dtype: str = "F32", **config: Any) -> Path:
    """Write a checkpoint of random weights, large enough that every tensor changes the logits, cut over ``ranks``
    ranks; ``config`` has further sections of the run."""
    arrays = some_arrays(1, logical_shapes(model), dtype, KINDS[:1])
    for key in arrays:
        arrays[key] *= np.asarray(0.3, arrays[key].dtype)
    return save(directory, 12, arrays, cut_flat(arrays, ranks), config={"model": asdict(model), **config})


def cut_flat(arrays: Arrays, ranks: int) -> List[Pieces]:
    """Each rank's pieces if every array's elements are divided into equal spans, as replicas that write together do."""
    pieces_by_rank: List[Pieces] = [[] for _ in range(ranks)]
    for name, array in arrays.items():
        size = math.prod(array.shape)
        ends = [size * rank // ranks for rank in range(ranks + 1)]
        for rank in range(ranks):
            for region in rectangles((0,) * array.ndim, array.shape, ends[rank], ends[rank + 1]):
                pieces_by_rank[rank].append((name, region))
    return pieces_by_rank


def save(
    directory: Path,
    iteration: int,
    arrays: Arrays,
    pieces_by_rank: Sequence[Pieces],
    ranks_per_file: int = 1,
    **more: Any,
) -> Path:
    """Write a checkpoint; the last of the ranks that share a file writes first, the first of them the header."""
    temporary = begin_checkpoint(directory, iteration)
    try:
        path = _save(temporary, iteration, arrays, pieces_by_rank, ranks_per_file, **more)
        update_tracker(path)
        return path
    finally:
        discard_temporary(temporary)


def _save(
    temporary: Path, iteration: int, arrays: Arrays, pieces_by_rank: Sequence[Pieces], ranks_per_file: int, **more: Any
) -> Path:
    shapes: Dict[str, Tuple[int, ...]] = {}
    kinds: Dict[str, Dict[str, str]] = {}
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        kinds.setdefault(name, {})[kind] = describe_dtype(array.dtype)
        shapes[name] = array.shape
    tensors = {name: LogicalTensor(shapes[name], kinds[name]) for name in shapes}
    files = []
    for first in range(0, len(pieces_by_rank), ranks_per_file):
        group = pieces_by_rank[first : first + ranks_per_file]
        pieces = [piece for rank in group for piece in rank]
        plan = plan_file([_entry(arrays, *piece) for piece in pieces])
        name, sums = file_name(len(files)), [0] * len(pieces)
        end = len(pieces)
        for rank in reversed(group):
            indices = range(end - len(rank), end)
            contents = [(index, _content(arrays, *pieces[index])) for index in indices]
            sums[indices.start : indices.stop] = write_pieces(
                temporary / name, plan, contents, header=indices.start == 0
            )
            end = indices.start
        files.append(describe_file(name, plan, sums, sorted(tensors)))
    manifest = Manifest(iteration, iteration * 8, iteration * 64, tensors, tuple(files), **more)
    return commit_checkpoint(temporary, manifest)


def _entry(arrays: Arrays, key: str, region: Region) -> Entry:
    kind, _, name = key.partition("/")
    return Entry(kind, name, region, describe_dtype(arrays[key].dtype))


def _content(arrays: Arrays, key: str, region: Region) -> Any:
    return arrays[key][region.within(full_region(arrays[key].shape))]
