"""Initial weights as a function of (seed, name, position): every layout starts from the same model, and no rank builds
more of it than a few rows at a time beyond its own slice."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from fugaku_gpt.layout.tensors import TensorSpec

_BLOCK_ROWS = 64  # rows drawn from one generator


def fill_parameter(parameter: torch.Tensor, spec: TensorSpec, seed: int, tp_rank: int, tp: int) -> None:
    """Fill one rank's part of a tensor in place.

    Values are drawn in float32 whatever the precision of training, so that a float64 run starts where a float32 run
    does.
    """
    if spec.init != "normal":
        torch.nn.init.constant_(parameter, 1.0 if spec.init == "ones" else 0.0)
        return
    part = spec.slice_of(tp_rank, tp)
    columns = part[-1]
    target = parameter.detach().view(-1, parameter.shape[-1])
    # rows of the whole tensor, flattened to two dimensions, that this rank holds, in order
    rows = np.arange(int(np.prod(spec.shape[:-1]))).reshape(spec.shape[:-1])[part[:-1]].reshape(-1)
    blocks = rows // _BLOCK_ROWS
    starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()  # the rows of a block follow one another
    for start, stop in zip(starts, [*starts[1:], len(rows)]):
        block = int(blocks[start])
        block_rows = rows[start:stop] - block * _BLOCK_ROWS
        values = _draw_block(spec, seed, block)[block_rows][:, columns]
        target[start:stop] = torch.from_numpy(np.ascontiguousarray(values)).to(parameter.dtype)


def _draw_block(spec: TensorSpec, seed: int, block: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Draw block number ``block``, [block rows, last dimension], of the whole tensor; vocabulary padding is zero."""
    digest = hashlib.sha256(f"{seed}/{spec.name}/{block}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal((_BLOCK_ROWS, spec.shape[-1]), dtype=np.float32)
    values *= np.float32(spec.std)
    if spec.rows is not None:
        values[max(0, spec.rows - block * _BLOCK_ROWS) :] = 0.0
    return values
