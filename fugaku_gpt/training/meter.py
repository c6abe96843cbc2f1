"""Measures times, memory and waiting for a line of the log, with a single maximum all-reduce over all ranks.

The maximum of (time, rank) pairs also says which rank is the slowest. Since an all-reduce compares single numbers, each
pair is packed into one float64 integer, ``microseconds * 2**20 + rank``: larger times win, and the low 20 bits name the
rank. The maximum of the negated numbers gives the fastest rank.
"""

from __future__ import annotations

import time
from typing import Tuple

import torch

from fugaku_gpt.machine import local
from fugaku_gpt.records.flight import LOG
from fugaku_gpt.training.log import IntervalMeasurements
from fugaku_gpt.training.trainer import Trainer

_MAX_RANKS = 2**20  # more than any job has
_MAX_MICROSECONDS = 2**33 - 1  # over two hours; together with 20 bits of rank they fill the 53 bits of a float64


class Meter:
    """Measures what a line of the log reports on the machine.

    Attributes:
        since: start of the first iteration after the last reading, by ``time.perf_counter()``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._last_reading = (0.0, 0.0, 0.0)
        self.since = time.perf_counter()

    def read(self, iterations: int) -> IntervalMeasurements:
        """Return the measurements of the iterations since the last reading, combined over all ranks; collective."""
        trainer, stages = self._trainer, self._trainer.config.layout.pp
        trainer.grid.world.mark_phase(LOG, micro_batch=-1)
        seconds, waited = (
            trainer.pipeline_seconds - self._last_reading[0],
            trainer.waited_seconds - self._last_reading[1],
        )
        computed = (trainer.computed_seconds - self._last_reading[2]) / iterations
        self._last_reading = (trainer.pipeline_seconds, trainer.waited_seconds, trainer.computed_seconds)
        figures = torch.zeros(6 + stages, dtype=torch.float64)
        figures[0], figures[1] = local.resident_bytes(), local.node_used_bytes()
        hidden = trainer.reducer.overlap.read()
        figures[2] = -hidden if hidden is not None else 0.0  # a figure on all ranks or on none
        # the last stage to finish gives the duration of the step's passes; the stages before it idle until then
        figures[3] = seconds
        figures[4] = pack_time_and_rank(computed, trainer.grid.world.rank)
        figures[5] = -figures[4]  # its maximum is the fastest rank
        figures[6 + trainer.grid.coordinates.pp] = max(
            seconds - waited, 1e-9
        )  # each rank fills its own stage's element
        trainer.grid.world.all_reduce(figures, "max")
        before, self.since = self.since, time.perf_counter()
        return IntervalMeasurements(
            (self.since - before) / iterations,
            int(figures[0]),
            int(figures[1]),
            tuple((figures[3] / figures[6:] - 1.0).tolist()) if stages > 1 else (),
            -float(figures[2]) if hidden is not None else None,
            (unpack_time_and_rank(float(figures[4])), unpack_time_and_rank(-float(figures[5])))
            if trainer.grid.world.size > 1
            else None,
        )


def pack_time_and_rank(seconds: float, rank: int) -> float:
    """Pack a time in microseconds and a rank into one number that a float64 holds exactly, ordered by the time first:
    ``microseconds * 2**20 + rank``."""
    return float(min(round(seconds * 1e6), _MAX_MICROSECONDS) * _MAX_RANKS + rank)


def unpack_time_and_rank(number: float) -> Tuple[float, int]:
    """Return the (seconds, rank) that :func:`pack_time_and_rank` packed."""
    microseconds, rank = divmod(int(number), _MAX_RANKS)
    return microseconds * 1e-6, rank
