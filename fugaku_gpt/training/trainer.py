"""One training run as an object: model, buffers, optimiser, data, and the step that uses them all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol, Tuple

import numpy as np
import torch

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.layout.batch import first_sample
from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.layout.stages import Chunk, split_layers, stage_tensors, work_of
from fugaku_gpt.model import build_stage, named_parameters, recompute_of
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.gradients import GradientSum, ParameterGather, counted_here, sum_of_squares
from fugaku_gpt.parallel.pipeline import Pipeline
from fugaku_gpt.training.optimizer import build_optimizer
from fugaku_gpt.training.schedule import learning_rate


class Samples(Protocol):
    """Where samples come from: numbered from 0 without end, the same for every rank."""

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Samples [first, first + count) as [count, seq_len + 1] token ids."""


@dataclass(frozen=True)
class Step:
    """What one iteration did, equal on every rank: mean loss per token, norm of the mean gradient before clipping,
    rate."""

    loss: float
    grad_norm: float
    lr: float


class Trainer:
    """Trains on ``train`` over the ranks of ``grid``; ``valid`` is what :meth:`validate` measures.

    Attributes:
        iteration: optimiser steps done.
        consumed_samples: samples used by them; the only state of the data.
    """

    def __init__(self, config: RunConfig, grid: ProcessGrid, train: Samples, valid: Optional[Samples] = None) -> None:
        self.config = config
        self.grid = grid
        self.iteration = 0
        self.consumed_samples = 0
        self._train = train
        self._valid = valid
        layout, training, model = config.layout, config.training, config.model
        chunks = chunks_of(config)
        mine = [chunk for chunk in chunks if chunk.stage == grid.place.pp]
        self.pieces = dict(
            zip([chunk.index for chunk in mine], build_stage(config, grid.tp, mine, recompute_of(config, chunks)))
        )
        pieces = list(self.pieces.values())
        sharded = layout.zero == 1 and grid.dp.size > 1
        self.buffers = FlatBuffers(
            named_parameters(pieces),
            stage_tensors(model, grid.tp.size, chunks, grid.place.pp),
            grid.dp.size if sharded else 1,
            int(training.bucket_mib * 2**20),
        )
        owned = self.buffers.owned(grid.dp.rank if sharded else 0, grid.dp.size if sharded else 1)
        self._owned_gradients = [self.buffers.gradients[part.gradients] for part in owned]
        self._runs = list(self.buffers.runs(owned, counted_here(grid, sharded)))
        self._optimizer = build_optimizer(self._runs, training)
        self.sum = GradientSum(self.buffers, pieces, grid, sharded, layout.sequence_parallel)
        self._gather = ParameterGather(self.buffers, pieces, grid.dp) if sharded else None
        self.pipeline = Pipeline(
            schedule(layout.schedule, grid.place.pp, layout.pp, config.micro_batches, layout.chunks),
            grid.pp,
            chunks[-1].index,
            (training.micro_batch, model.seq_len // (layout.tp if layout.sequence_parallel else 1), model.hidden),
            getattr(torch, training.dtype),
        )
        self._order = list(self.pieces)
        self._tokens_per_batch = training.global_batch * model.seq_len

    def step(self) -> Step:
        """One iteration over one global batch.

        Raises:
            RunFailed: loss or gradient is not finite; on every rank alike, and the parameters are left as they were.
        """
        training = self.config.training
        for piece in self.pieces.values():
            piece.train()
        self.sum.begin()
        total = self._losses(self._train, self.consumed_samples, self._before_last_backward)
        self.sum.finish()
        loss, norm = self._agree(total)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise RunFailed(
                f"iteration {self.iteration + 1}: loss {loss:g}, gradient norm {norm:g}: not finite; "
                "lower training.lr, set training.clip_grad, or look at the data"
            )
        clip = training.clip_grad / norm if training.clip_grad and norm > training.clip_grad else 1.0
        # gradients are sums over all tokens of the global batch up to here: one pass divides and clips
        for gradients in self._owned_gradients:
            gradients.mul_(clip / self._tokens_per_batch)
        lr = learning_rate(training, self.iteration)
        self._optimizer.step(lr)
        if self._gather is not None:
            self._gather.start()
        self.iteration += 1
        self.consumed_samples += training.global_batch
        return Step(loss=loss, grad_norm=norm, lr=lr)

    def validate(self) -> float:
        """Mean loss per token over the first ``training.eval_batches`` global batches of the validation split."""
        if self._valid is None:
            raise ValueError("this trainer was built without validation samples")
        for piece in self.pieces.values():
            piece.eval()
        total = 0.0
        with torch.no_grad():
            for batch in range(self.config.training.eval_batches):
                total += self._losses(self._valid, batch * self.config.training.global_batch)
        whole = torch.tensor([total], dtype=torch.float64)
        self.grid.dp.all_reduce(whole)
        self.grid.pp.all_reduce(whole)
        return float(whole) / (self.config.training.eval_batches * self._tokens_per_batch)

    def _losses(
        self, samples: Samples, consumed: int, before_last_backward: Optional[Callable[[int], None]] = None
    ) -> float:
        """The sum of this replica's tokens' losses over one global batch, on the last stage; 0 elsewhere. With
        gradients enabled they are left in the buffers."""
        total = 0.0

        def forward(micro_batch: int, chunk: int, x: Optional[torch.Tensor]) -> torch.Tensor:
            nonlocal total
            piece = self.pieces[chunk]
            first = first_sample(self.config, consumed, micro_batch, self.grid.place.dp)
            ends = piece.chunk.has_embedding or piece.chunk.has_head  # tokens are wanted there only
            tokens = torch.from_numpy(samples.batch(first, self.config.training.micro_batch)) if ends else None
            y: torch.Tensor = piece(
                tokens[:, :-1] if x is None and tokens is not None else x,
                tokens[:, 1:] if tokens is not None else None,
                first,
            )
            if piece.chunk.has_head:
                total += float(y.detach())
            return y

        self.pipeline.run(forward, before_last_backward)
        return total

    def _before_last_backward(self, chunk: int) -> None:
        self.sum.last_backward(self._order.index(chunk))

    def _agree(self, total: float) -> Tuple[float, float]:
        """(mean loss per token, norm of the mean gradient), from one sum over all ranks: whatever is not finite
        anywhere is not finite everywhere."""
        counted = total if self.grid.place.tp == 0 else 0.0 * total
        sums = torch.tensor([counted, sum_of_squares(self._runs)], dtype=torch.float64)
        self.grid.world.all_reduce(sums)
        return float(sums[0]) / self._tokens_per_batch, math.sqrt(float(sums[1])) / self._tokens_per_batch


def chunks_of(config: RunConfig) -> Tuple[Chunk, ...]:
    """The chunks of a run's pipeline, in the order of the forward pass."""
    layout = config.layout
    work = work_of(config.model, config.padded_vocab)
    return split_layers(config.model.layers, layout.pp, layout.chunks, work, layout.split or None)
