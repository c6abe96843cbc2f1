"""One training run as an object: model, buffers, optimiser, data, and the step that uses them all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional, Protocol

import numpy as np
import torch

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.layout.batch import first_sample
from fugaku_gpt.layout.tensors import model_tensors
from fugaku_gpt.model import build_model
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.gradients import gradient_norm, sum_over_replicas
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
        self.model = build_model(config, grid.tp)
        self.buffers = FlatBuffers(dict(self.model.named_parameters()), model_tensors(config.model, grid.tp.size))
        self._optimizer = build_optimizer(self.buffers, config.training)
        self._tokens_per_batch = config.training.global_batch * config.model.seq_len

    def step(self) -> Step:
        """One iteration over one global batch.

        Raises:
            RunFailed: loss or gradient is not finite; on every rank alike, and the parameters are left as they were.
        """
        training = self.config.training
        self.model.train()
        loss = self._accumulate_gradients()
        sum_over_replicas(self.buffers.gradients, self.grid.dp, int(training.bucket_mib * 2**20))
        norm = gradient_norm(self.buffers, self.grid) / self._tokens_per_batch
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise RunFailed(
                f"iteration {self.iteration + 1}: loss {loss:g}, gradient norm {norm:g}: not finite; "
                "lower training.lr, set training.clip_grad, or look at the data"
            )
        clip = training.clip_grad / norm if training.clip_grad and norm > training.clip_grad else 1.0
        # gradients are sums over all tokens of the global batch up to here: one pass divides and clips
        self.buffers.gradients.mul_(clip / self._tokens_per_batch)
        lr = learning_rate(training, self.iteration)
        self._optimizer.step(lr)
        self.iteration += 1
        self.consumed_samples += training.global_batch
        return Step(loss=loss, grad_norm=norm, lr=lr)

    def validate(self) -> float:
        """Mean loss per token over the first ``training.eval_batches`` global batches of the validation split."""
        if self._valid is None:
            raise ValueError("this trainer was built without validation samples")
        self.model.eval()
        total = torch.zeros(1, dtype=torch.float64)
        with torch.no_grad():
            for batch in range(self.config.training.eval_batches):
                for micro_batch in range(self.config.micro_batches):
                    total += self._loss(self._valid, batch * self.config.training.global_batch, micro_batch)
        self.grid.dp.all_reduce(total)
        return float(total) / (self.config.training.eval_batches * self._tokens_per_batch)

    def _accumulate_gradients(self) -> float:
        """Leave in the buffers this replica's gradients of the sum of its tokens' losses; return the global mean
        loss."""
        self.buffers.gradients.zero_()
        total = torch.zeros(1, dtype=torch.float64)
        for micro_batch in range(self.config.micro_batches):
            loss = self._loss(self._train, self.consumed_samples, micro_batch)
            loss.backward()
            total += loss.detach()
        self.grid.dp.all_reduce(total)
        return float(total) / self._tokens_per_batch

    def _loss(self, samples: Samples, consumed: int, micro_batch: int) -> torch.Tensor:
        first = first_sample(self.config, consumed, micro_batch, self.grid.place.dp)
        tokens = torch.from_numpy(samples.batch(first, self.config.training.micro_batch))  # [b, s + 1]
        return self.model(tokens[:, :-1], tokens[:, 1:], first)
