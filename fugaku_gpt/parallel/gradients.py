"""What happens to gradients between the backward pass and the optimiser: their sum over replicas, and their norm."""

from __future__ import annotations

import math

import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.parallel.buffers import FlatBuffers

_NORM_BLOCK = 65536  # elements whose squares are summed in the tensor's own precision before float64 takes over


def sum_over_replicas(gradients: torch.Tensor, dp: Communicator, bucket_bytes: int) -> None:
    """Sum the flat gradients [elements] over the replicas in place, a bucket at a time."""
    if dp.size == 1:
        return
    step = max(1, bucket_bytes // gradients.element_size())
    for start in range(0, gradients.numel(), step):
        dp.all_reduce(gradients[start : start + step])


def gradient_norm(buffers: FlatBuffers, grid: ProcessGrid) -> float:
    """The 2-norm of the whole model's gradient, equal on every rank.

    A tensor that every tensor-parallel rank holds whole is counted by the first of them only. A result that is not
    finite means that some gradient is not.
    """
    squares = 0.0
    for placement in buffers.placements:
        if placement.spec.tp_dim is not None or grid.place.tp == 0:
            squares += _sum_of_squares(buffers.gradients[placement.start : placement.start + placement.size])
    total = torch.tensor([squares], dtype=torch.float64)
    grid.tp.all_reduce(total)
    return math.sqrt(float(total))


def _sum_of_squares(flat: torch.Tensor) -> float:
    total = 0.0
    for block in flat.split(_NORM_BLOCK):
        total += float(torch.dot(block, block))
    return total
