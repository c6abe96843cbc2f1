"""Measures losses beside the steps of a run, at its intervals: of the validation split, and of evaluation files."""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

from fugaku_gpt.checkpoint.retention import LOSS_SOURCES, LOSSES
from fugaku_gpt.config.schema import VALIDATION
from fugaku_gpt.training.eval_files import EvalFiles
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.trainer import Trainer

_IS_OVERDUE = "evaluation_is_overdue"  # in a checkpoint's state: losses were due, and the run was to stop

_SECONDS = "evaluation_seconds"  # in a checkpoint's state: how long the last measurement took, on rank 0


class Validation:
    """Measures losses; every rank makes the same calls.

    Attributes:
        on_measured: called after each measurement with the seconds that it took.

    Args:
        log: the run's log, on rank 0 only.
        files: files to evaluate; None: none.
        state: of the checkpoint from which the run was resumed; empty if it was not.
        fingerprint: of the samples of the validation split.
    """

    def __init__(
        self,
        trainer: Trainer,
        log: Optional[TrainingLog] = None,
        files: Optional[EvalFiles] = None,
        state: Optional[Mapping[str, Any]] = None,
        fingerprint: str = "",
    ) -> None:
        self._trainer, self._log, self._files = trainer, log, files
        self._interval = trainer.config.training.eval_interval
        self._last_loss: Optional[float] = (state or {}).get("validation_loss")
        self.on_measured: Callable[[float], None] = lambda seconds: None
        self._is_overdue = bool((state or {}).get(_IS_OVERDUE))
        seconds = (state or {}).get(_SECONDS)
        # of the last measurement, of this run or the one before; 0 if there was none, or of an older version
        self._seconds = seconds if isinstance(seconds, float) and 0.0 <= seconds < math.inf else 0.0
        self._iteration: Optional[int] = None
        self._losses: Dict[str, float] = {}
        training, model = trainer.config.training, trainer.config.model
        settings = (fingerprint, training.seed, training.global_batch, training.eval_batches, model.seq_len)
        self._sources = {VALIDATION: _digest(settings)}
        for name, digest in files.digests.items() if files is not None else ():
            self._sources[name] = _digest((digest, model.seq_len))
        self._records_losses = files is not None or trainer.config.checkpoint.keep_best is not None

    def is_due(self, iteration: int) -> bool:
        """Whether losses are to be measured after this iteration: at the run's start and end, and each interval."""
        if self._interval is None:
            return False
        return iteration % self._interval == 0 or iteration == self._trainer.config.training.iterations

    def is_due_at_start(self) -> bool:
        """Whether losses are to be measured before the first step: of a new run, or of one that was resumed from a
        checkpoint whose losses it had no time to measure."""
        return self._interval is not None and (self._is_overdue or self._trainer.iteration == 0)

    def time_before_next_step(self) -> float:
        """Return the seconds that a measurement after the current iteration will take, by the last one; 0 if none is
        due."""
        return self._seconds if self.is_due(self._trainer.iteration + 1) else 0.0

    def run(self) -> None:
        """Measure and log all losses; collective."""
        before = time.perf_counter()
        self._measure()
        self._seconds = time.perf_counter() - before
        self.on_measured(self._seconds)

    def _measure(self) -> None:
        trainer, losses = self._trainer, self._losses
        iteration = trainer.iteration
        losses.clear()
        if trainer.has_validation:
            loss = trainer.validate()
            if self._log is not None:
                tokens = sum(size.samples * size.seq_len for size in trainer.validated)
                consumed, last_loss = trainer.consumed_tokens, self._last_loss
                self._log.validation(iteration, loss, tokens, last_loss, trainer.validated, consumed_tokens=consumed)
            self._last_loss = losses[VALIDATION] = loss
        for result in self._files.losses(trainer) if self._files is not None else []:
            losses[result.name] = result.loss
            if self._log is not None:
                self._log.evaluation(iteration, result, trainer.consumed_tokens)
        self._iteration = iteration

    def state(self) -> Dict[str, Any]:
        """Return what a checkpoint of this iteration records, for JSON."""
        last = self._last_loss
        state: Dict[str, Any] = {"validation_loss": last if last is not None and math.isfinite(last) else None}
        if self._seconds:
            state[_SECONDS] = self._seconds
        is_measured = self._iteration == self._trainer.iteration
        if self.is_due(self._trainer.iteration) and not is_measured:
            state[_IS_OVERDUE] = True
        if self._records_losses and is_measured:
            finite = {name: loss for name, loss in self._losses.items() if math.isfinite(loss)}
            state[LOSSES], state[LOSS_SOURCES] = finite, {name: self._sources[name] for name in finite}
        return state


def _digest(values: Tuple[Union[str, int], ...]) -> str:
    return hashlib.sha256(repr(values).encode("utf-8")).hexdigest()
