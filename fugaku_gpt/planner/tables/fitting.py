"""A machine's constants from measured rows, and how far off the models are on rows that they were not fitted to.

Residuals are logarithms of predicted over measured. Runs that died of memory count too: as a figure that should have
come out above what the machine has, and runs that did not as one that should not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import UNIT_BYTES, Fitted, Machine
from fugaku_gpt.planner.extrapolation import distance, outside, seen_inputs
from fugaku_gpt.planner.intervals import NORMAL_80, total_width
from fugaku_gpt.planner.least_squares import Fit, fit
from fugaku_gpt.planner.tables.footprint import MEMORY_CONSTANTS, footprint, unit_of
from fugaku_gpt.planner.tables.rows import ConfigRow, Measurement, table_name
from fugaku_gpt.planner.tables.seconds import TIME_CONSTANTS, seconds
from fugaku_gpt.planner.tables.work import FACTS, Work, work_of

GROUPS: Dict[str, Callable[[ConfigRow], object]] = {
    "configuration": lambda row: row.run_key,
    "table": lambda row: table_name(row.id),
}
_ESTIMATED = 0.25  # weight of rows that their tables call estimated, or that died after their first iteration
_LEFT_OUT_ROUNDS = 6  # from the fit to all rows it is a short way
_LEFT_OUT_ENOUGH = 1e-4
_LEAST_BEYOND = 0.01  # of intervals outside of the rows' hull, for each factor of e

MeasuredRow = Tuple[ConfigRow, Measurement]


@dataclass(frozen=True)
class SkippedSamples:
    """What a model that never saw a row says of it.

    Args:
        predicted: in the row's unit; of memory what the reading shows.
        peak: memory of the fullest stage; of seconds the same as ``predicted``.
        width: standard deviation of the prediction's logarithm that the constants' own widths make.
        beyond: how far the row lies outside of the hull of those that the model saw.
        repeated: an earlier table shows this very measurement.
    """

    row: ConfigRow
    measured: Measurement
    predicted: float
    peak: float
    width: float
    beyond: float = 0.0
    repeated: bool = False


@dataclass(frozen=True)
class _Problem:
    """Misfits of one model to rows, as a function of the logarithms of its free constants."""

    fitted: Fitted
    measurements: Tuple[MeasuredRow, ...]
    work: Work
    predict: Callable[[Work, Mapping[str, float]], Tuple["np.ndarray", "np.ndarray"]]
    target: "np.ndarray"  # [N] logarithms of what was measured, NaN where nothing was
    weight: "np.ndarray"  # [N]
    room: "np.ndarray"  # [N] memory of the row's hardware
    died: "np.ndarray"  # [N] of memory
    repeated: "np.ndarray"  # [N] an earlier row is the same measurement: judged, but not fitted to twice
    of_memory: bool  # what died has to come out above its room, what lived below
    memory: "Optional[_Problem]" = None  # of a model of time that asks how full the memory is

    def take(self, chosen: "np.ndarray") -> "_Problem":
        return replace(
            self,
            measurements=tuple(one for one, keep in zip(self.measurements, chosen) if keep),
            work=self.work.take(chosen),
            target=self.target[chosen],
            weight=self.weight[chosen],
            room=self.room[chosen],
            died=self.died[chosen],
            repeated=self.repeated[chosen],
        )

    @property
    def distinct(self) -> "_Problem":
        """Each measurement once."""
        return self.take(~self.repeated)

    @property
    def file_values(self) -> "np.ndarray":
        """Logarithms of the free constants as the machine has them."""
        logarithms: "np.ndarray" = np.log([one.value for one in self.fitted.free])
        return logarithms

    def constants(self, values: "np.ndarray") -> Dict[str, float]:
        return {**self.fitted.values, **dict(zip((one.name for one in self.fitted.free), np.exp(values)))}

    def outcome(self, values: "np.ndarray") -> Tuple["np.ndarray", "np.ndarray"]:
        return self.predict(self.work, self.constants(values))

    def misfit(self, values: "np.ndarray") -> "np.ndarray":
        predicted, peak = self.outcome(values)
        known = ~np.isnan(self.target)
        off = np.where(known, np.log(predicted) - np.where(known, self.target, 0.0), 0.0)
        room = np.log(self.room / peak) if self.of_memory else np.zeros_like(off)
        wrong_side = np.maximum(0.0, np.where(self.died, room, -room))
        both: "np.ndarray" = np.concatenate([off * np.sqrt(self.weight), wrong_side]) / self.fitted.spread
        return both

    def filled(self, memory_values: "np.ndarray") -> "_Problem":
        """With the fullness that these logarithms of the memory model's constants give."""
        assert self.memory is not None
        _, peak = self.memory.predict(self.work, self.memory.constants(memory_values))
        return replace(self, work=replace(self.work, fullness=peak / self.room))

    def fit(self, start: "Optional[np.ndarray]" = None) -> Fit:
        prior = np.log([one.prior for one in self.fitted.free])
        width = np.array([one.prior_width for one in self.fitted.free])
        misfit = self.distinct.misfit
        if start is None:
            return fit(misfit, prior, width)
        return fit(misfit, prior, width, start, _LEFT_OUT_ROUNDS, _LEFT_OUT_ENOUGH)

    def widths(self, found: Fit) -> "np.ndarray":
        """Standard deviations [N] of the predictions' logarithms."""
        slopes = log_slopes(lambda values: self.outcome(values)[0], found.values)
        widths: "np.ndarray" = np.sqrt(np.einsum("ij,jk,ik->i", slopes, found.covariance, slopes))
        return widths

    def fitted_by(self, found: Fit) -> Fitted:
        widths = iter(np.sqrt(np.diag(found.covariance)))
        values = iter(np.exp(found.values))
        rows = [row for row, _ in self.distinct.measurements]
        constants = tuple(
            replace(one, value=float(next(values)), width=float(next(widths))) if one.prior_width > 0 else one
            for one in self.fitted.constants
        )
        return replace(
            self.fitted,
            constants=constants,
            covariance=tuple(tuple(float(number) for number in line) for line in found.covariance),
            rows=tuple(row.id for row in rows),
            seen=seen_inputs(rows),
        )


def log_slopes(outcome: "Callable[[np.ndarray], np.ndarray]", values: "np.ndarray") -> "np.ndarray":
    """Derivatives [N, P] of the logarithm of ``outcome`` by each of the values [P]."""
    here, step = np.log(outcome(values)), 1e-4
    slopes = np.empty((len(here), len(values)))
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += step
        slopes[:, index] = (np.log(outcome(moved)) - here) / step
    return slopes


def check_complete(machine: Machine) -> None:
    """Refuse a machine whose file, written by hand, lacks what the models need.

    Raises:
        UsageError: it is of ``plan probe``, or facts or constants are missing.
    """
    if machine.probed is not None:
        raise UsageError(
            f"machine {machine.name}: its file is of `plan probe` and tells of runs of our own trainer, not of rows; "
            "`plan time RUN.yaml --machine FILE.yaml` reads it"
        )
    missing = [f"facts {name}" for name in FACTS if name not in machine.facts]
    missing += [f"time {name}" for name in TIME_CONSTANTS if name not in machine.time.values]
    missing += [f"memory {name}" for name in MEMORY_CONSTANTS if name not in machine.memory.values]
    if missing:
        raise UsageError(f"machine {machine.name}: its file lacks {', '.join(missing)}")


def time_problem(machine: Machine, measurements: Sequence[MeasuredRow]) -> _Problem:
    """Rows with measured seconds; a measurement that stands in several tables is fitted to once.

    How full the memory is, where that counts, is what the machine's model of memory says.
    """
    chosen = [one for one in measurements if one[1].seconds]

    def predict(work: Work, constants: Mapping[str, float]) -> Tuple["np.ndarray", "np.ndarray"]:
        found = seconds(work, constants, machine.facts)
        return found, found

    problem = _Problem(
        fitted=machine.time,
        measurements=tuple(chosen),
        work=work_of([row for row, _ in chosen], machine.facts),
        predict=predict,
        target=np.log([measured.seconds or np.nan for _, measured in chosen]),
        weight=np.array([1.0 if measured.status == "ok" else _ESTIMATED for _, measured in chosen]),
        room=_room(machine, chosen),
        died=np.zeros(len(chosen), dtype=bool),
        repeated=_repeated(chosen, lambda measured: measured.seconds),
        of_memory=False,
    )
    if "memory_pressure" not in machine.time.values:
        return problem
    memory = memory_problem(machine, measurements)
    return replace(problem, memory=memory).filled(memory.file_values)


def memory_problem(machine: Machine, measurements: Sequence[MeasuredRow]) -> _Problem:
    """Rows with measured memory, and rows of which it is known whether memory was enough."""
    judged = [one for one in measurements if one[1].out_of_memory or one[1].status == "ok"]
    chosen = [(row, _in_unit(row, measured, machine.memory_unit)) for row, measured in judged]

    def predict(work: Work, constants: Mapping[str, float]) -> Tuple["np.ndarray", "np.ndarray"]:
        return footprint(work, constants, machine.facts, machine.memory_unit, machine.memory_of == "node")

    readings = [measured.memory if measured.memory and not measured.out_of_memory else np.nan for _, measured in chosen]
    return _Problem(
        fitted=machine.memory,
        measurements=tuple(chosen),
        work=work_of([row for row, _ in chosen], machine.facts),
        predict=predict,
        target=np.log(readings),
        weight=np.ones(len(chosen)),
        room=_room(machine, chosen),
        died=np.array([measured.out_of_memory for _, measured in chosen], dtype=bool),
        repeated=_repeated(chosen, lambda measured: (measured.memory, measured.out_of_memory)),
        of_memory=True,
    )


def _in_unit(row: ConfigRow, measured: Measurement, unit: str) -> Measurement:
    """With its memory in a machine's unit, and without one where the row's is not known."""
    own = unit_of(row.mem_unit, unit)
    if measured.memory is None or own == unit:
        return measured
    return replace(measured, memory=measured.memory * UNIT_BYTES[own] / UNIT_BYTES[unit] if own else None)


def _room(machine: Machine, measurements: Sequence[MeasuredRow]) -> "np.ndarray":
    return np.array([machine.capacity(row.hardware) for row, _ in measurements])


def _repeated(measurements: Sequence[MeasuredRow], reading: Callable[[Measurement], Any]) -> "np.ndarray":
    """For each row whether an earlier one is of its configuration and read the same."""
    found = set()
    repeated = np.zeros(len(measurements), dtype=bool)
    for place, (row, measured) in enumerate(measurements):
        read = reading(measured)
        key = (row.hardware, row.configuration_key, round(read, 1) if isinstance(read, float) else read)
        repeated[place] = key in found
        found.add(key)
    return repeated


def left_out(problem: _Problem, by: str, start: "np.ndarray") -> List[SkippedSamples]:
    """Each row predicted by a fit that saw neither its group nor, in whatever table, a run that its group has.

    Args:
        by: one of :data:`GROUPS`.
        start: the fit to all rows.
    """
    keys = [GROUPS[by](row) for row, _ in problem.measurements]
    found: Dict[int, SkippedSamples] = {}
    for key in dict.fromkeys(keys):
        mine = np.array([other == key for other in keys])
        known = {row.run_key for (row, _), one in zip(problem.measurements, mine) if one}

        def others(part: _Problem, key: object = key, known: "Set[Tuple[object, ...]]" = known) -> "np.ndarray":
            return np.array([GROUPS[by](row) != key and row.run_key not in known for row, _ in part.measurements])

        rest = problem.take(others(problem))
        fitted = rest.fit(start)
        seen = seen_inputs([row for row, _ in rest.measurements])
        part = problem.take(mine)
        memory = problem.memory
        if memory is not None:
            part = part.filled(memory.take(others(memory)).fit(memory.file_values).values)
        predicted, peak = part.outcome(fitted.values)
        widths = part.widths(fitted)
        for index, place in enumerate(np.flatnonzero(mine)):
            row, measured = part.measurements[index]
            numbers = (float(predicted[index]), float(peak[index]), float(widths[index]), distance(outside(row, seen)))
            found[int(place)] = SkippedSamples(row, measured, *numbers, repeated=bool(part.repeated[index]))
    return [found[place] for place in range(len(keys))]


def interval_spread(rows: Sequence[SkippedSamples]) -> float:
    """The spread which, with each prediction's own width, makes 80 % intervals hold 80 % of the rows."""
    return _least_that_holds(rows, lambda spread: [np.hypot(one.width, spread) for one in rows])


def beyond_spread(rows: Sequence[SkippedSamples], spread: float) -> float:
    """What intervals have to grow by for each factor of e outside of the rows' hull to hold 80 % of the rows there.

    Args:
        rows: all outside of the hull of those that they were predicted from.
        spread: of :func:`interval_spread`.
    """
    found = _least_that_holds(rows, lambda more: [total_width(one.width, spread, more, one.beyond) for one in rows])
    return max(_LEAST_BEYOND, found)


def _least_that_holds(rows: Sequence[SkippedSamples], widths: Callable[[float], Sequence[float]], share: float = 0.8) -> float:
    """The least number with whose widths (of logarithms, a row each) 80 % intervals hold ``share`` of the rows."""
    off = np.array([abs(np.log(one.predicted / (one.measured.seconds or np.nan))) for one in rows])
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        held = np.mean(off <= NORMAL_80 * np.array(widths(middle)))
        low, high = (low, middle) if held >= share else (middle, high)
    return high


@dataclass(frozen=True)
class Refit:
    """A machine fitted anew, and what its models say of rows that were left out of the fit."""

    machine: Machine
    seconds: Dict[str, List[SkippedSamples]]
    memory: Dict[str, List[SkippedSamples]]


def refit(machine: Machine, measurements: Sequence[MeasuredRow], groups: Sequence[str] = tuple(GROUPS)) -> Refit:
    """Both models of a machine fitted to rows, each with its error on left-out groups.

    Intervals are set by the rows left out by configuration, and how they grow outside of the rows' hull by those left
    out by table that lie there, where these are among the groups.

    Raises:
        UsageError: as :func:`check_complete`.
    """
    check_complete(machine)
    memory = memory_problem(machine, measurements)
    memory_fit = memory.fit()
    machine = replace(machine, memory=memory.fitted_by(memory_fit))
    time = time_problem(machine, measurements)
    time_fit = time.fit()
    seconds_out = {by: left_out(time, by, time_fit.values) for by in groups}
    memory_out = {by: left_out(memory, by, memory_fit.values) for by in groups}
    time_fitted = time.fitted_by(time_fit)
    judged = {
        by: [one for one in rows if one.measured.status == "ok" and not one.repeated]
        for by, rows in seconds_out.items()
    }
    if "configuration" in judged:
        time_fitted = replace(time_fitted, interval_spread=interval_spread(judged["configuration"]))
    beyond = [one for one in judged.get("table", []) if one.beyond > 0]
    if beyond:
        time_fitted = replace(time_fitted, beyond_spread=beyond_spread(beyond, time_fitted.interval_spread))
    return Refit(replace(machine, time=time_fitted), seconds_out, memory_out)
