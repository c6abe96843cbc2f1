"""What happens to gradients between the backward pass and the optimiser: their sums, and who counts them.

The flat gradients are summed over replicas a bucket at a time, in the order in which the backward pass of the last
micro-batch finishes them, while it goes on computing. With ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1) each
replica gets the sum of its own share of every bucket only, steps that share, and the parameters are gathered again
while the next forward pass begins.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from torch import nn

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.comm.node_first import Chain
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.layout.sequence import runs_alone
from fugaku_gpt.parallel.buffers import FlatBuffers, accumulation_of, nbytes
from fugaku_gpt.parallel.overlap import Overlap


class GradientReducer:
    """Sums a rank's gradients over its groups.

    Usage in a step: :meth:`begin`; backward passes; :meth:`last_backward` of each piece of the model before its last
    backward pass; :meth:`finish`.

    Attributes:
        overlap: what of the replicas' communication is hidden.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        pieces: Sequence[nn.Module],
        grid: ProcessGrid,
        sharded: bool,
        sequence_parallel: bool = False,
        dtype: Optional[torch.dtype] = None,
        at_once: int = 4,
    ) -> None:
        """
        Args:
            dtype: precision of the sums over replicas; default: that of the flat gradients.
            at_once: buckets that are summed at one time: MPI takes memory of its own for each.
        """
        self._buffers = buffers
        self._grid = grid
        self._sharded = sharded
        self._tp_replicated = buffers.layout.tp_replicated if sequence_parallel and grid.tp.size > 1 else slice(0, 0)
        self._tied = buffers.layout.tied(grid.dp.size if sharded else 1) if grid.embedding.size > 1 else []
        self._pieces = [{id(parameter) for parameter in piece.parameters()} for piece in pieces]
        # bucket → parameters (by id) that lie in it; a parameter of several pieces must be finished by each
        self._members: List[List[int]] = [[] for _ in buffers.buckets]
        self._nodes: List[Any] = []  # hooks live as long as the nodes that they are on
        by_name: Dict[str, nn.Parameter] = {}
        for piece in pieces:
            by_name.update(piece.named_parameters())
        for placement in buffers.placements:
            parameter = by_name[placement.spec.name]
            for index, bucket in enumerate(buffers.buckets):
                if placement.start < bucket.stop and bucket.start < placement.span.stop:
                    self._members[index].append(id(parameter))
            node = accumulation_of(parameter)
            node.register_hook(self._hook(id(parameter)))  # runs when autograd has added the gradient up
            self._nodes.append(node)
        buffers.late.finished = self._finished
        # [elements] of another type than the gradients, in which they travel
        self._rounded: Optional[torch.Tensor] = None
        if grid.dp.size > 1 and dtype not in (None, buffers.gradients.dtype):
            self._rounded = torch.zeros_like(buffers.gradients, dtype=dtype)
        self._missing: Dict[int, int] = {}
        self._armed: List[int] = []
        self._at_once = at_once
        self._started: List[Union[Pending, Chain]] = []
        self._steps = 0
        self._alone = False
        self.overlap = Overlap(grid.dp, sharded)

    @property
    def bytes(self) -> int:
        """Of memory in which sums travel, beside the gradients themselves."""
        return nbytes(self._rounded) if self._rounded is not None else 0

    def begin(self) -> None:
        """A step begins: no gradient is finished."""
        self._buffers.gradients.zero_()
        self._missing = {}
        for piece in self._pieces:
            for key in piece:
                self._missing[key] = self._missing.get(key, 0) + 1
        self._armed = []
        self._started = []
        self._alone = runs_alone(self._steps)
        self._steps += 1

    def last_backward(self, piece: int) -> None:
        """The next backward pass is the last one of this step through one of the pieces."""
        self._armed.append(piece)

    def poll(self) -> None:
        """Let MPI get on with what has been started."""
        for pending in self._started:
            pending.done()

    def finish(self) -> None:
        """Sum what is not summed yet, and wait for all of it."""
        if self._tp_replicated.stop > self._tp_replicated.start:
            # under sequence parallelism each rank has seen its tokens only
            self._grid.tp.all_reduce(self._buffers.gradients[self._tp_replicated])
        if self._grid.dp.size > 1:
            self._sum_replicas()
        for pending in [self._grid.embedding.start_all_reduce(self._buffers.gradients[part]) for part in self._tied]:
            pending.wait()

    def _sum_replicas(self) -> None:
        if self._alone:
            self.overlap.meet()
        elif self._started:
            self.overlap.sums.count_background()
        before = time.perf_counter()
        while len(self._started) < len(self._buffers.buckets):
            self._start_next()
        for pending, bucket in zip(self._started, self._buffers.buckets):
            pending.wait()
            if self._rounded is not None:  # with sharded sums only the first part of a bucket means anything
                size = (bucket.stop - bucket.start) // (self._grid.dp.size if self._sharded else 1)
                part = slice(bucket.start, bucket.start + size)
                self._buffers.gradients[part].copy_(self._rounded[part])
        seconds = time.perf_counter() - before
        if self._alone:
            self.overlap.sums.took_alone(seconds)
            self.overlap.gather_is_due = True
        else:
            self.overlap.sums.exposed_seconds += seconds
            self.overlap.sums.steps += 1

    def _hook(self, key: int) -> Any:
        def ready(*_: Any) -> None:
            if not self._buffers.late.waits(key):
                self._finished(key)

        return ready

    def _finished(self, key: int) -> None:
        if self._armed and any(key in self._pieces[piece] for piece in self._armed):
            self._ready(key)

    def _ready(self, key: int) -> None:
        self._missing[key] -= 1
        if self._grid.dp.size == 1 or self._alone:
            return
        before = time.perf_counter()
        if not self._started:
            self.overlap.sums.begin_background()
        while len(self._started) < len(self._buffers.buckets) and self._may_start(len(self._started)):
            self._start_next()
        self.poll()
        seconds = time.perf_counter() - before
        self.overlap.sums.exposed_seconds += seconds
        self.overlap.sums.polled_seconds += seconds

    def _may_start(self, index: int) -> bool:
        """Whether all of a bucket is finished and needs no sum over another group first."""
        bucket = self._buffers.buckets[index]
        if any(self._missing[key] > 0 for key in self._members[index]):
            return False
        return not (self._tp_replicated.start < bucket.stop and bucket.start < self._tp_replicated.stop)

    def _start_next(self) -> None:
        index = len(self._started)
        if index >= self._at_once:  # not as one ends: each step of each rank makes its calls at the same place
            self._started[index - self._at_once].wait()
        part = self._buffers.buckets[index]
        bucket = self._buffers.gradients[part]
        if self._rounded is not None:
            bucket = self._rounded[part].copy_(bucket)
        replicas = self._grid.replicas
        start = replicas.start_reduce_scatter if self._sharded else replicas.start_all_reduce
        self._started.append(start(bucket))
