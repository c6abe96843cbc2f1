"""Finds the largest batch that fits into memory, for each combination of settings, by really running it.

The planner's estimate of memory is the first trial; :mod:`fugaku_gpt.sweep.edge_search` chooses the next ones. Each
trial is a run in a directory of its own, ``OUT/<combination>-mbs<N>-r1``, as those of other sweeps. A trial that
exceeds ``node.memory_limit`` is ended by the memory guard of its ranks and is a row with the status ``oom``. Recorded
trials are not repeated, so that the same command continues a search that was stopped or killed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Protocol, Set, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.trainer.memory_check import NodeLimits, refuse_too_large
from fugaku_gpt.records.run import INTERRUPTED, OK, OUT_OF_MEMORY, REFUSED, Result
from fugaku_gpt.sweep.edge_search import Verdict, largest_that_fits, next_trial, next_trial_for_rate
from fugaku_gpt.sweep.expand import Run
from fugaku_gpt.sweep.folder import require_same_run
from fugaku_gpt.sweep.frontier_plan import FrontierPlan, FrontierRow, on_this_machine
from fugaku_gpt.sweep.lock import SweepLock
from fugaku_gpt.sweep.run import Launch, LocalRuns

SAMPLES, TOKENS = "samples/s", "tokens/s"
_PER_SECOND = "_per_second"


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        batch: its micro-batch.
        is_earlier: whether it was recorded by an earlier call.
        is_beyond_machine: whether it was refused because it would fill this machine.
    """

    batch: int
    run: Run
    result: Result
    is_earlier: bool = False
    is_beyond_machine: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, and if not, whether that was for lack of memory."""
        if self.result.status == OK:
            return Verdict.FITS
        lacks_memory = self.result.status == OUT_OF_MEMORY or self.is_beyond_machine
        return Verdict.NO_MEMORY if lacks_memory else Verdict.BROKEN

    @property
    def global_batch(self) -> Optional[int]:
        """Samples of an iteration, as its settings have it, also where they are refused."""
        text = str(self.run.written_settings.get("training.global_batch", ""))
        return int(text) if text.isdecimal() else None

    @property
    def rates(self) -> Dict[str, float]:
        """Unit → rate: samples per second, and each rate that the run itself has measured; empty if it did not end
        well. Where samples have a unit of the run's own, such as images per second, it stands for them."""
        summary, config = self.result.summary, self.run.config
        seconds = summary.get("seconds_per_iteration")
        if self.result.status != OK or config is None or not seconds:
            return {}
        measured = {
            f"{key[: -len(_PER_SECOND)]}/s": float(value)
            for key, value in summary.items()
            if key.endswith(_PER_SECOND) and value is not None
        }
        samples = config.training.global_batch / seconds
        same = (unit for unit, rate in measured.items() if unit != TOKENS and math.isclose(rate, samples, rel_tol=1e-6))
        return {next(same, SAMPLES): samples, **measured}

    @property
    def samples_per_second(self) -> Optional[float]:
        """Samples of the global batch per second; None if it did not end well."""
        return next(iter(self.rates.values()), None)


@dataclass(frozen=True)
class Edge:
    """The result of one combination.

    Attributes:
        planned: largest micro-batch that fits by the planner; None if none does.
        trials: all trials, by their micro-batch.
        above: the smallest micro-batch above the largest one that fits, which does not; None: there is none.
        is_complete: whether the search has come to its end.
    """

    row: FrontierRow
    planned: Optional[int]
    trials: Tuple[Trial, ...]
    above: Optional[Trial]
    is_complete: bool

    @property
    def largest(self) -> Optional[Trial]:
        """The largest trial that fits; None if none does."""
        return max(
            (trial for trial in self.trials if trial.verdict is Verdict.FITS),
            key=lambda trial: trial.batch,
            default=None,
        )

    @property
    def fastest(self) -> Optional[Trial]:
        """The fastest trial, the smallest batch among equals; None if none fits."""
        fitting = [trial for trial in self.trials if trial.samples_per_second is not None]
        return max(fitting, key=lambda trial: (trial.samples_per_second or 0.0, -trial.batch), default=None)

    @property
    def has_failed(self) -> bool:
        """True if the edge is that of a failure other than memory; a combination that is no valid configuration, and a
        batch beyond what is valid or fits this machine, are results and no failures."""
        above = self.above
        if above is None or above.verdict is not Verdict.BROKEN:
            return False
        return above.result.status != REFUSED or (self.largest is None and above.run.config is not None)

    @property
    def gaps(self) -> Tuple[Trial, ...]:
        """Trials below the largest one that fits, which do not: memory did not grow with the batch, or a run failed."""
        largest = self.largest
        return tuple(
            trial
            for trial in self.trials
            if largest and trial.batch < largest.batch and trial.verdict is not Verdict.FITS
        )


class FrontierProgress(Protocol):
    """Reports the progress of a search."""

    def row_started(self, row: FrontierRow, planned: Optional[int]) -> None:
        """Reports that a combination begins, with the largest micro-batch that is planned to fit."""

    def trial_started(self, row: FrontierRow, batch: int) -> None:
        """Reports that ranks are started."""

    def trial_ended(self, row: FrontierRow, ended: Trial) -> None:
        """Reports how a trial has ended, now or in an earlier call."""


def find_frontier(
    plan: FrontierPlan,
    out: Path,
    launch: Launch,
    progress: FrontierProgress,
    limits: NodeLimits,
    *,
    timeout: Optional[float] = None,
    retry_failed: bool = False,
    is_full_curve: bool = False,
) -> List[Edge]:
    """Searches every combination. If the search is stopped, the list ends with the combination in which it was stopped.

    Args:
        launch: starts the ranks of one trial and waits for them; see :func:`fugaku_gpt.launch.launcher.launch`.
        limits: this machine and its memory.
        timeout: seconds for each trial.
        retry_failed: whether trials that did not end well are made again.
        is_full_curve: whether all powers of two below the largest batch are tried.

    Raises:
        UsageError: a sweep runs in ``out``, or ``out`` holds other configurations under the same names.
    """
    with SweepLock(out) as lock:
        for row in plan.rows:
            for batch in plan.batches:
                if (out / plan.run_name(row, batch)).is_dir():
                    require_same_run(plan.run(row, batch), out / plan.run_name(row, batch))
        edges: List[Edge] = []
        for row in plan.rows:
            check = _MachineCheck(limits, bool(row.value("node.memory_check")))
            runs = LocalRuns(plan.name, out, launch, lock.mark, timeout, retry_failed, check)
            edge = _Search(plan, row, runs, check, progress, is_full_curve).edge()
            edges.append(edge)
            if not edge.is_complete:
                break
        return edges


class _Search:
    """The search of one combination."""

    def __init__(
        self,
        plan: FrontierPlan,
        row: FrontierRow,
        runs: LocalRuns,
        check: "_MachineCheck",
        progress: FrontierProgress,
        is_full_curve: bool,
    ) -> None:
        self._plan, self._row, self._runs, self._check, self._progress = plan, row, runs, check, progress
        self._is_full_curve = is_full_curve
        self._batches = plan.batches
        self._guess = plan.planned_index(row, check.limits)
        self._trials: Dict[int, Trial] = {}

    def edge(self) -> Edge:
        """Makes the trials that are missing."""
        planned = self._batches[self._guess] if self._guess >= 0 else None
        self._progress.row_started(self._row, planned)
        self._read_recorded()
        is_complete = True
        while is_complete:
            index = self._next()
            if index is None:
                break
            is_complete = self._trial(index)
        largest = largest_that_fits(self._verdicts())
        above = min((index for index in self._trials if index > largest), default=None)
        trials = tuple(self._trials[index] for index in sorted(self._trials))
        return Edge(self._row, planned, trials, self._trials[above] if above is not None else None, is_complete)

    def _next(self) -> Optional[int]:
        verdicts = self._verdicts()
        index = next_trial(len(self._batches), self._guess, verdicts)
        largest = largest_that_fits(verdicts)
        if index is not None or largest < 0:
            return index
        rates = {index: ended.samples_per_second for index, ended in self._trials.items()}
        return next_trial_for_rate(self._batches, largest, rates, self._is_full_curve)

    def _verdicts(self) -> Mapping[int, Verdict]:
        return {index: ended.verdict for index, ended in self._trials.items()}

    def _read_recorded(self) -> None:
        """Takes the trials of earlier calls."""
        for index, batch in enumerate(self._batches):
            directory = self._runs.out / self._plan.run_name(self._row, batch)
            if not directory.is_dir():
                continue
            run = self._plan.run(self._row, batch)
            result = self._runs.reusable_result(run)
            if result is not None:
                self._trials[index] = Trial(batch, run, result, is_earlier=True)
                self._progress.trial_ended(self._row, self._trials[index])

    def _trial(self, index: int) -> bool:
        """Makes a trial; returns whether the search continues."""
        batch = self._batches[index]
        run = self._plan.run(self._row, batch)
        self._progress.trial_started(self._row, batch)
        result, is_stopped = self._runs.start(run)
        ended = Trial(batch, run, result, is_beyond_machine=batch in self._check.refused)
        if result.status != INTERRUPTED:
            self._trials[index] = ended
        self._progress.trial_ended(self._row, ended)
        return not is_stopped


class _MachineCheck:
    """Refuses trials of a combination that would fill this machine itself, whatever ``node.memory_limit`` is.

    Attributes:
        limits: this machine and its memory.
        refused: micro-batches of the trials that it has refused.
    """

    def __init__(self, limits: NodeLimits, is_on: bool) -> None:
        self.limits, self._is_on = limits, is_on
        self.refused: Set[int] = set()

    def __call__(self, config: RunConfig) -> None:
        """Refuses a trial that does not fit.

        Raises:
            UsageError: it does not fit.
        """
        local_config = on_this_machine(config)
        node = replace(local_config.node, memory_limit="", memory_check=self._is_on)
        try:
            refuse_too_large(replace(local_config, node=node), self.limits, range(config.layout.ranks))
        except UsageError:
            self.refused.add(config.training.micro_batch)
            raise
