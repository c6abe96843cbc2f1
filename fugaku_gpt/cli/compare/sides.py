"""The options of ``fugaku-gpt compare``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional, Tuple

from fugaku_gpt.cli.options import data_overrides, scheduler_overrides
from fugaku_gpt.compare.shared_run import TOLERANCE, SharedRun
from fugaku_gpt.config.source import RunSource


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command; None stands for an option that was not given."""

    data: Optional[str]
    ranks: Optional[int]
    iterations: int
    warm_up: Optional[int]
    pairs: int
    budget: Optional[float]
    at_least: int
    tolerance: Optional[float]
    load: float
    reruns: int
    out: Optional[Path]
    form: str
    plot: Optional[Path]
    fail_on: Tuple[str, ...]
    job: Optional[str]
    factorial: Optional[str]
    fraction: int
    repeats: int
    seed: int
    scheduler: Optional[str]
    start: Tuple[str, ...]
    unpacked: Optional[Path]

    @property
    def tolerance_or_default(self) -> float:
        """The relative difference within which two sides count as the same."""
        return self.tolerance if self.tolerance is not None else TOLERANCE

    def shared_run(self, source: RunSource) -> SharedRun:
        """The run that all sides change, from ``source`` and with the data and the scheduler of these options."""
        settings = (*data_overrides(self.data), *source.settings, *scheduler_overrides(self.scheduler or self.job))
        return SharedRun(replace(source, settings=settings), self.ranks, self.iterations, self.warm_up)
