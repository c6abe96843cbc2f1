"""Checkpoints without a trainer: named arrays, cut over ranks in some way, saved through the package's own writer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.layout.regions import Region, rectangles, whole
from fugaku_gpt.records.checkpoint import begin, commit
from fugaku_gpt.records.checkpoint_file import DTYPES, Entry, describe_dtype, file_name, plan_file, write_pieces
from fugaku_gpt.records.checkpoint_manifest import LogicalTensor, Manifest, describe_file

Arrays = Mapping[str, Any]  # "kind/tensor" → array
Held = List[Tuple[str, Region]]  # one rank's pieces: ("kind/tensor", region)
KINDS = ("weights", "first_moment", "second_moment")
SHAPES: Dict[str, Tuple[int, ...]] = {"a.weight": (3, 4, 5), "a.bias": (7,), "b.weight": (6, 8), "scale": ()}


def some_arrays(seed: int, shapes: Mapping[str, Tuple[int, ...]] = SHAPES, dtype: str = "F32") -> Dict[str, Any]:
    """Random arrays of every kind."""
    rng = np.random.RandomState(seed)
    return {
        f"{kind}/{name}": rng.randn(*shape).astype(DTYPES[dtype]) if shape else np.array(rng.randn(), DTYPES[dtype])
        for kind in KINDS
        for name, shape in shapes.items()
    }


def cut_flat(arrays: Arrays, ranks: int) -> List[Held]:
    """Each array's elements shared out to ranks in equal runs, as replicas that write together do."""
    held: List[Held] = [[] for _ in range(ranks)]
    for name, array in arrays.items():
        size = math.prod(array.shape)
        ends = [size * rank // ranks for rank in range(ranks + 1)]
        for rank in range(ranks):
            for region in rectangles((0,) * array.ndim, array.shape, ends[rank], ends[rank + 1]):
                held[rank].append((name, region))
    return held


def save(directory: Path, iteration: int, arrays: Arrays, held: Sequence[Held], token: str = "0", **more: Any) -> Path:
    """Write a checkpoint, one file a rank."""
    temporary = begin(directory, iteration, token)
    tensors: Dict[str, Dict[str, str]] = {}
    shapes: Dict[str, Tuple[int, ...]] = {}
    for key, array in arrays.items():
        kind, name = key.split("/")
        tensors.setdefault(name, {})[kind] = describe_dtype(array.dtype)
        shapes[name] = array.shape
    logical = {name: LogicalTensor(shapes[name], kinds) for name, kinds in tensors.items()}
    files = []
    for rank, pieces in enumerate(held):
        entries = [
            Entry(*key.split("/"), region, describe_dtype(arrays[key].dtype))
            for key, region in pieces  # type: ignore
        ]
        plan = plan_file(entries)
        contents = [
            (index, np.asarray(arrays[key][region.within(whole(arrays[key].shape))]))
            for index, (key, region) in enumerate(pieces)
        ]
        sums = write_pieces(temporary / file_name(rank), plan, contents)
        files.append(describe_file(file_name(rank), plan, sums, sorted(logical)))
    values = {"consumed_samples": iteration * 8, "consumed_tokens": iteration * 64, **more}
    return commit(temporary, Manifest(iteration=iteration, tensors=logical, files=tuple(files), **values))
