"""Numerical health: what becomes of a step whose loss or gradient is not finite, or whose loss is a spike.

Every rank decides alone and all decide alike, since they decide by the same numbers: those of the one sum over all
ranks that gives loss and norm. (MPI demands that an all-reduce gives identical results on every rank.)
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

DONE, NOT_FINITE, OVERFLOW, SPIKE = "", "not finite", "overflow", "spike"  # what became of a step


class Optimizer(Protocol):
    """What a copy needs to know of an optimiser."""

    steps: int
    moments: List[Tuple[torch.Tensor, torch.Tensor]]


def squares_of(runs: Sequence[ParamRange]) -> Tuple[float, bool]:
    """The sum of squares of the gradients that this rank counts, and whether all that it owns are finite, counted or
    not: the others would wait for the ranks that count anyway."""
    counted, rest = 0.0, 0.0
    for run in runs:
        if run.counts:
            counted += ops.sum_of_squares(run.gradients)
        else:
            rest += ops.sum_of_squares(run.gradients)
    return counted, math.isfinite(counted) and math.isfinite(rest)


class Health:
    """Judges step after step.

    A step that is left out changes neither weights nor moments nor the optimiser's count of steps; its iteration and
    its samples are used up, and so is its place in the schedule of the learning rate.

    Attributes:
        left_out: steps that were not done, so far.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self._in_a_row = 0
        self._returns = 0
        self.left_out = 0
        self._window = LossWindow(training.spike_window, training.spike_deviations, training.spike_ratio)

    def judge(self, iteration: int, loss: float, norm: float, bad_ranks: int, overflow: bool = False) -> str:
        """What becomes of a step: ``DONE``, ``NOT_FINITE``, ``OVERFLOW`` or ``SPIKE``.

        Args:
            iteration: its number, from 1.
            bad_ranks: how many ranks have seen something that is not finite.
            overflow: that is because of the loss scale, which is lowered: no reason to stop.

        Raises:
            RunFailed: the run is to stop here; on every rank alike.
        """
        training = self._training
        if overflow:
            self.left_out += 1
            return OVERFLOW
        if bad_ranks or not (math.isfinite(norm) and math.isfinite(loss)):
            where = f" on {bad_ranks} ranks" if bad_ranks > 1 else ""
            what = f"iteration {iteration}: loss {loss:g}, gradient norm {norm:g}: not finite{where}"
            mend = "lower training.lr, set training.clip_grad, or look at the data"
            if training.non_finite == "stop":
                raise RunFailed(f"{what}; {mend}, or set training.non_finite=skip")
            self._in_a_row += 1
            if self._in_a_row >= training.max_skips:
                raise RunFailed(f"{what}, {self._in_a_row} times in a row; {mend}")
            self.left_out += 1
            return NOT_FINITE
        self._in_a_row = 0
        limit = self._window.limit() if training.rollback_every is not None else None
        if limit is not None and loss > limit:
            self._returns += 1
            if self._returns > training.max_skips:
                raise RunFailed(
                    f"iteration {iteration}: loss {loss:g} is above {limit:g}, although the run has gone back "
                    f"{training.max_skips} times; lower training.lr, or raise training.spike_deviations"
                )
            self.left_out += 1
            self._window.go_back()
            return SPIKE
        self._window.add(loss)
        return DONE

    def state(self) -> Dict[str, Any]:
        """All that later judgements depend on, for JSON."""
        return {
            "in_a_row": self._in_a_row,
            "returns": self._returns,
            "left_out": self.left_out,
            "losses": self._window.losses,
            "kept_losses": self._window.kept,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        self._in_a_row, self._returns, self.left_out = (int(state[key]) for key in ("in_a_row", "returns", "left_out"))
        self._window.load(state["losses"], state["kept_losses"])

    @property
    def may_return(self) -> bool:
        """Whether the next loss may be judged a spike."""
        return self._training.rollback_every is not None and self._window.limit() is not None

    def copy_is_due(self, iteration: int) -> bool:
        """Whether a copy is to be kept after this iteration."""
        every = self._training.rollback_every
        return every is not None and iteration % every == 0

    def kept(self, verdict: str) -> None:
        """A copy was kept after a step of this verdict."""
        self._window.keep()
        if verdict == DONE:
            self._returns = 0


class LossWindow:
    """The last losses, and the limit above which one more is a spike."""

    def __init__(self, size: int, deviations: Optional[float], ratio: Optional[float]) -> None:
        self._losses: Deque[float] = deque(maxlen=size)
        self._kept: List[float] = []
        self._size = size
        self._deviations = deviations
        self._ratio = ratio

    def limit(self) -> Optional[float]:
        """mean + deviations * standard deviation, or ratio * mean, whichever is lower; None until the window is
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
        """One more loss; the oldest leaves a full window."""
        self._losses.append(loss)

    @property
    def losses(self) -> List[float]:
        """The last ones, oldest first."""
        return list(self._losses)

    @property
    def kept(self) -> List[float]:
        """Those that :meth:`go_back` would bring back."""
        return list(self._kept)

    def load(self, losses: Sequence[float], kept: Sequence[float]) -> None:
        """Be another window, of whatever size, whose last losses these are."""
        self._losses = deque(losses, maxlen=self._size)
        self._kept = list(kept)

    def keep(self) -> None:
        """Remember the window as it is."""
        self._kept = list(self._losses)

    def go_back(self) -> None:
        """To the window that was kept last: the losses since are those of steps that are undone."""
        self._losses = deque(self._kept, maxlen=self._size)


class StateCopy:
    """Weights and optimiser state of what this rank owns, as they were.

    Attributes:
        iteration, consumed: iterations done and samples consumed when it was kept; 0 before the first time.
        steps: of the optimiser by then.
        tensors: of each run: weights and both moments; empty before the first time.
    """

    def __init__(self, runs: Sequence[ParamRange], optimizer: Optimizer) -> None:
        self._runs = list(runs)
        self._optimizer = optimizer
        self.tensors: List[Tuple[torch.Tensor, ...]] = []
        self.iteration = 0
        self.consumed = 0
        self.steps = 0

    def keep(self, iteration: int, consumed: int) -> None:
        """Keep what there is now."""
        if self.tensors:
            for kept, live in zip(self.tensors, self._live()):
                for copy, tensor in zip(kept, live):
                    copy.copy_(tensor)
        else:
            self.tensors = [tuple(tensor.detach().clone() for tensor in live) for live in self._live()]
        self.iteration, self.consumed, self.steps = iteration, consumed, self._optimizer.steps

    def go_back(self) -> None:
        """Have what was kept last again."""
        for kept, live in zip(self.tensors, self._live()):
            for copy, tensor in zip(kept, live):
                tensor.copy_(copy)
        self._optimizer.steps = self.steps

    @property
    def bytes(self) -> int:
        """Of memory that it takes."""
        return nbytes(*(copy for kept in self.tensors for copy in kept))

    def _live(self) -> List[Tuple[torch.Tensor, ...]]:
        return [(run.parameters, *moments) for run, moments in zip(self._runs, self._optimizer.moments)]
