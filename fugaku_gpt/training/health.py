"""Numerical health: decides what to do with a step whose loss or gradient is not finite, or whose loss is a spike.

Every rank decides for itself, and all reach the same verdict, because they use the same numbers: those of the one sum
over all ranks that gives loss and norm. (MPI demands that an all-reduce gives identical results on every rank.)
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Deque, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

import torch

from fugaku_gpt import ops
from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.parallel.buffers import ParamRange, nbytes

DONE, NOT_FINITE, OVERFLOW, SPIKE = "", "not finite", "overflow", "spike"  # verdicts on a step


class Optimizer(Protocol):
    """The optimiser state that a copy includes."""

    steps: int
    moments: List[Tuple[torch.Tensor, torch.Tensor]]


def squares_of(param_ranges: Sequence[ParamRange]) -> Tuple[float, bool]:
    """Return the sum of squares of the gradients that this rank counts, and whether all gradients that it owns are
    finite, counted or not. (Checking the uncounted ones costs no time, since ranks wait for those that count more.)"""
    counted, rest = 0.0, 0.0
    for param_range in param_ranges:
        if param_range.counts:
            counted += ops.sum_of_squares(param_range.gradients)
        else:
            rest += ops.sum_of_squares(param_range.gradients)
    return counted, math.isfinite(counted) and math.isfinite(rest)


class Health:
    """Judges step after step.

    A skipped step changes neither weights nor moments nor the optimiser's count of steps. It uses up its iteration, its
    samples and its position in the learning-rate schedule.

    Attributes:
        skipped_steps: number of steps skipped so far.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self._skips_in_a_row = 0
        self._rollbacks = 0
        self.skipped_steps = 0
        self._window = LossWindow(training.spike_window, training.spike_deviations, training.spike_ratio)

    def judge(self, iteration: int, loss: float, norm: float, bad_ranks: int, overflow: bool = False) -> str:
        """Return the verdict on a step: ``DONE``, ``NOT_FINITE``, ``OVERFLOW`` or ``SPIKE``.

        Args:
            iteration: number of the iteration, from 1.
            bad_ranks: number of ranks that have seen a value that is not finite.
            overflow: the loss scale caused it and is lowered, so there is no reason to stop.

        Raises:
            RunFailed: the run must stop here; raised on every rank.
        """
        training = self._training
        if overflow:
            self.skipped_steps += 1
            return OVERFLOW
        if bad_ranks or not (math.isfinite(norm) and math.isfinite(loss)):
            where = f" on {bad_ranks} ranks" if bad_ranks > 1 else ""
            problem = f"iteration {iteration}: loss {loss:g}, gradient norm {norm:g}: not finite{where}"
            remedy = "lower training.lr, set training.clip_grad, or look at the data"
            if training.non_finite == "stop":
                raise RunFailed(f"{problem}; {remedy}, or set training.non_finite=skip")
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= training.max_skips:
                raise RunFailed(f"{problem}, {self._skips_in_a_row} times in a row; {remedy}")
            self.skipped_steps += 1
            return NOT_FINITE
        self._skips_in_a_row = 0
        limit = self._window.limit() if training.rollback_every is not None else None
        if limit is not None and loss > limit:
            self._rollbacks += 1
            if self._rollbacks > training.max_skips:
                raise RunFailed(
                    f"iteration {iteration}: loss {loss:g} is above {limit:g}, although the run has gone back "
                    f"{training.max_skips} times; lower training.lr, or raise training.spike_deviations"
                )
            self.skipped_steps += 1
            self._window.restore()
            return SPIKE
        self._window.add(loss)
        return DONE

    def state(self) -> Dict[str, Any]:
        """Return everything that later verdicts depend on, for JSON."""
        return {
            "in_a_row": self._skips_in_a_row,
            "returns": self._rollbacks,
            "left_out": self.skipped_steps,
            "losses": self._window.losses,
            "kept_losses": self._window.saved_losses,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self._skips_in_a_row, self._rollbacks, self.skipped_steps = (
            int(state[key]) for key in ("in_a_row", "returns", "left_out")
        )
        self._window.load(state["losses"], state["kept_losses"])

    @property
    def can_roll_back(self) -> bool:
        """True if the next loss may be judged a spike."""
        return self._training.rollback_every is not None and self._window.limit() is not None

    def copy_is_due(self, iteration: int) -> bool:
        """True if the state is to be copied after this iteration."""
        every = self._training.rollback_every
        return every is not None and iteration % every == 0

    def copy_saved(self, verdict: str) -> None:
        """Note that the state was copied after a step with this verdict."""
        self._window.save()
        if verdict == DONE:
            self._rollbacks = 0


class LossWindow:
    """The last losses, and the limit above which one more is a spike."""

    def __init__(self, size: int, deviations: Optional[float], ratio: Optional[float]) -> None:
        self._losses: Deque[float] = deque(maxlen=size)
        self._saved_losses: List[float] = []
        self._size = size
        self._deviations = deviations
        self._ratio = ratio

    def limit(self) -> Optional[float]:
        """Return mean + deviations * standard deviation, or ratio * mean, whichever is lower; None until the window is
        full."""
        if len(self._losses) < self._size:
            return None
        mean = math.fsum(self._losses) / self._size
        limits = []
        if self._deviations is not None:
            variance = math.fsum((loss - mean) ** 2 for loss in self._losses) / self._size
            limits.append(mean + self._deviations * math.sqrt(variance))
        if self._ratio is not None:
            limits.append(self._ratio * mean)
        return min(limits) if limits else None

    def add(self, loss: float) -> None:
        """Add a loss; the oldest one leaves a full window."""
        self._losses.append(loss)

    @property
    def losses(self) -> List[float]:
        """The losses in the window, oldest first."""
        return list(self._losses)

    @property
    def saved_losses(self) -> List[float]:
        """The losses that :meth:`restore` would bring back."""
        return list(self._saved_losses)

    def load(self, losses: Sequence[float], saved_losses: Sequence[float]) -> None:
        """Continue from these losses, whatever the size of the window that they come from."""
        self._losses = deque(losses, maxlen=self._size)
        self._saved_losses = list(saved_losses)

    def save(self) -> None:
        """Save the window for :meth:`restore`."""
        self._saved_losses = list(self._losses)

    def restore(self) -> None:
        """Return to the window that was saved last: the losses since then belong to steps that are undone."""
        self._losses = deque(self._saved_losses, maxlen=self._size)


class StateCopy:
    """A copy of the weights and optimiser state that this rank owns, to which a loss spike returns.

    Attributes:
        iteration, consumed: iterations done and samples consumed when it was saved; 0 before the first save.
        steps: optimiser steps done when it was saved.
        tensors: weights and both moments of each parameter range; empty before the first save.
    """

    def __init__(self, param_ranges: Sequence[ParamRange], optimizer: Optimizer) -> None:
        self._param_ranges = list(param_ranges)
        self._optimizer = optimizer
        self.tensors: List[Tuple[torch.Tensor, ...]] = []
        self.iteration = 0
        self.consumed = 0
        self.steps = 0

    def save(self, iteration: int, consumed: int) -> None:
        """Copy the live state."""
        if self.tensors:
            for copies, live in zip(self.tensors, self._live()):
                for copy, tensor in zip(copies, live):
                    copy.copy_(tensor)
        else:
            self.tensors = [tuple(tensor.detach().clone() for tensor in live) for live in self._live()]
        self.iteration, self.consumed, self.steps = iteration, consumed, self._optimizer.steps

    def restore(self) -> None:
        """Write the copy back to the live state."""
        for copies, live in zip(self.tensors, self._live()):
            for copy, tensor in zip(copies, live):
                tensor.copy_(copy)
        self._optimizer.steps = self.steps

    @property
    def bytes(self) -> int:
        """Memory of the copy, in bytes."""
        return nbytes(*(copy for copies in self.tensors for copy in copies))

    def _live(self) -> List[Tuple[torch.Tensor, ...]]:
        return [
            (param_range.parameters, *moments)
            for param_range, moments in zip(self._param_ranges, self._optimizer.moments)
        ]
