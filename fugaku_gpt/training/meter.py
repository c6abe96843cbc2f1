"""What a line of the log says of the machine: times, memory, waiting, from one maximum over all ranks."""

from __future__ import annotations

import time
from typing import Tuple

import torch

from fugaku_gpt.machine import local
from fugaku_gpt.records.flight import LOG
from fugaku_gpt.training.log import Measured
from fugaku_gpt.training.trainer import Trainer

_RANKS = 2**20  # more than any job has; a float64 holds a rank and microseconds of two hours without loss
_LONGEST = 2**33 - 1  # microseconds


class Meter:
    """Reads what a line of the log says of the machine.

    Attributes:
        since: when the first iteration after the last reading has begun, by ``time.perf_counter()``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._read = (0.0, 0.0, 0.0)
        self.since = time.perf_counter()

    def read(self, iterations: int) -> Measured:
        """Over all ranks, from the largest values of each, and over the iterations since the last reading;
        collective."""
        trainer, stages = self._trainer, self._trainer.config.layout.pp
        trainer.grid.world.mark_phase(LOG, micro_batch=-1)
        seconds, waited = trainer.pipeline_seconds - self._read[0], trainer.waited_seconds - self._read[1]
        computed = (trainer.computed_seconds - self._read[2]) / iterations
        self._read = (trainer.pipeline_seconds, trainer.waited_seconds, trainer.computed_seconds)
        figures = torch.zeros(6 + stages, dtype=torch.float64)
        figures[0], figures[1] = local.resident_bytes(), local.node_used_bytes()
        hidden = trainer.reducer.overlap.read()
        figures[2] = -hidden if hidden is not None else 0.0  # known on all ranks or on none
        # the stage that is done last says how long the step's passes took: one that is done before it idles on
        figures[3] = seconds
        figures[4] = with_rank(computed, trainer.grid.world.rank)
        figures[5] = -figures[4]  # its largest is the fastest rank's
        figures[6 + trainer.grid.coordinates.pp] = max(seconds - waited, 1e-9)  # each rank fills its own stage's place
        trainer.grid.world.all_reduce(figures, "max")
        before, self.since = self.since, time.perf_counter()
        return Measured(
            (self.since - before) / iterations,
            int(figures[0]),
            int(figures[1]),
            tuple((figures[3] / figures[6:] - 1.0).tolist()) if stages > 1 else (),
            -float(figures[2]) if hidden is not None else None,
            (of_rank(float(figures[4])), of_rank(-float(figures[5]))) if trainer.grid.world.size > 1 else None,
        )


def with_rank(seconds: float, rank: int) -> float:
    """A time, to the microsecond, and whose it is, as one number that is ordered by the time."""
    return float(min(round(seconds * 1e6), _LONGEST) * _RANKS + rank)


def of_rank(number: float) -> Tuple[float, int]:
    """(seconds, rank) of :func:`with_rank`."""
    microseconds, rank = divmod(int(number), _RANKS)
    return microseconds * 1e-6, rank
