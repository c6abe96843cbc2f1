"""Fits a machine's constants to measured rows, and measures the models' errors on rows that were left out of the fit.

Residuals are logarithms of predicted over measured. Runs that ran out of memory count too: their predicted memory
should exceed the capacity of the machine, and that of all other runs should not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import UNIT_BYTES, FittedModel, Machine
from fugaku_gpt.planner.extrapolation import extrapolated_inputs, extrapolation_distance, input_ranges_of
from fugaku_gpt.planner.intervals import NORMAL_80, total_width
from fugaku_gpt.planner.least_squares import Fit, fit_least_squares
from fugaku_gpt.planner.tables.footprint import MEMORY_CONSTANTS, footprint, unit_of
from fugaku_gpt.planner.tables.rows import ConfigRow, Measurement, table_name
from fugaku_gpt.planner.tables.seconds import TIME_CONSTANTS, iteration_seconds
from fugaku_gpt.planner.tables.work import FACTS, Work, count_work

GROUPS: Dict[str, Callable[[ConfigRow], object]] = {
    "configuration": lambda row: row.run_key,
    "table": lambda row: table_name(row.id),
}
_ESTIMATED = 0.25  # weight of rows that their tables call estimated, or that failed after their first iteration
_LEFT_OUT_MAX_ROUNDS = 6  # the search begins at the fit to all rows, which is close
_LEFT_OUT_TOLERANCE = 1e-4
_LEAST_BEYOND_SPREAD = 0.01  # least growth of intervals outside of the fitted ranges, for each factor of e

MeasuredRow = Tuple[ConfigRow, Measurement]


@dataclass(frozen=True)
class LeftOutPrediction:
    """A row, and its prediction by a model that was fitted without it.

    Args:
        predicted: prediction in the row's unit; for memory, the value that a reading would show.
        peak: memory of the fullest stage; for seconds the same as ``predicted``.
        width: standard deviation of the prediction's logarithm due to the widths of the constants.
        distance: distance of the row from the ranges of the rows that the model was fitted to, in logarithms.
        repeated: whether an earlier table has the same measurement.
    """

    row: ConfigRow
    measured: Measurement
    predicted: float
    peak: float
    width: float
    distance: float = 0.0
    repeated: bool = False


@dataclass(frozen=True)
class _FitProblem:
    """Residuals of one model on rows, as a function of the logarithms of its free constants."""

    fitted: FittedModel
    measured_rows: Tuple[MeasuredRow, ...]
    work: Work
    predict: Callable[[Work, Mapping[str, float]], Tuple["np.ndarray", "np.ndarray"]]
    target: "np.ndarray"  # [N] logarithms of measured values, NaN if there is none
    weight: "np.ndarray"  # [N]
    capacity: "np.ndarray"  # [N] memory capacity of the row's hardware
    out_of_memory: "np.ndarray"  # [N] whether the run ran out of memory
    repeated: "np.ndarray"  # [N] whether an earlier row is the same measurement: scored, but not fitted twice
    of_memory: bool  # a model of memory: runs without enough memory have to exceed their capacity, all others not
    memory: "Optional[_FitProblem]" = None  # for a model of time that depends on how full the memory is

    def select(self, mask: "np.ndarray") -> "_FitProblem":
        return replace(
            self,
            measured_rows=tuple(
                measured_row for measured_row, is_selected in zip(self.measured_rows, mask) if is_selected
            ),
            work=self.work.select(mask),
            target=self.target[mask],
            weight=self.weight[mask],
            capacity=self.capacity[mask],
            out_of_memory=self.out_of_memory[mask],
            repeated=self.repeated[mask],
        )

    @property
    def distinct(self) -> "_FitProblem":
        """The problem with each measurement once."""
        return self.select(~self.repeated)

    @property
    def initial_values(self) -> "np.ndarray":
        """Logarithms of the free constants in the machine's file."""
        logarithms: "np.ndarray" = np.log([constant.value for constant in self.fitted.free_constants])
        return logarithms

    def constants(self, values: "np.ndarray") -> Dict[str, float]:
        return {
            **self.fitted.values,
            **dict(zip((constant.name for constant in self.fitted.free_constants), np.exp(values))),
        }

    def outcome(self, values: "np.ndarray") -> Tuple["np.ndarray", "np.ndarray"]:
        return self.predict(self.work, self.constants(values))

    def misfit(self, values: "np.ndarray") -> "np.ndarray":
        predicted, peak = self.outcome(values)
        is_measured = ~np.isnan(self.target)
        log_errors = np.where(is_measured, np.log(predicted) - np.where(is_measured, self.target, 0.0), 0.0)
        log_margins = np.log(self.capacity / peak) if self.of_memory else np.zeros_like(log_errors)
        wrong_side = np.maximum(0.0, np.where(self.out_of_memory, log_margins, -log_margins))
        residuals: "np.ndarray" = np.concatenate([log_errors * np.sqrt(self.weight), wrong_side]) / self.fitted.spread
        return residuals

    def with_fullness(self, memory_values: "np.ndarray") -> "_FitProblem":
        """The problem with the fullness that follows from these logarithms of the memory model's constants."""
        assert self.memory is not None
        _, peak = self.memory.predict(self.work, self.memory.constants(memory_values))
        return replace(self, work=replace(self.work, fullness=peak / self.capacity))

    def fit(self, start: "Optional[np.ndarray]" = None) -> Fit:
        prior = np.log([constant.prior for constant in self.fitted.free_constants])
        width = np.array([constant.prior_width for constant in self.fitted.free_constants])
        misfit = self.distinct.misfit
        if start is None:
            return fit_least_squares(misfit, prior, width)
        return fit_least_squares(misfit, prior, width, start, _LEFT_OUT_MAX_ROUNDS, _LEFT_OUT_TOLERANCE)

    def widths(self, solution: Fit) -> "np.ndarray":
        """Standard deviations [N] of the predictions' logarithms."""
        slopes = log_slopes(lambda values: self.outcome(values)[0], solution.values)
        widths: "np.ndarray" = np.sqrt(np.einsum("ij,jk,ik->i", slopes, solution.covariance, slopes))
        return widths

    def fitted_by(self, solution: Fit) -> FittedModel:
        widths = iter(np.sqrt(np.diag(solution.covariance)))
        values = iter(np.exp(solution.values))
        rows = [row for row, _ in self.distinct.measured_rows]
        constants = tuple(
            replace(constant, value=float(next(values)), width=float(next(widths)))
            if constant.prior_width > 0
            else constant
            for constant in self.fitted.constants
        )
        return replace(
            self.fitted,
            constants=constants,
            covariance=tuple(tuple(float(number) for number in line) for line in solution.covariance),
            rows=tuple(row.id for row in rows),
            input_ranges=input_ranges_of(rows),
        )


def log_slopes(outcome: "Callable[[np.ndarray], np.ndarray]", values: "np.ndarray") -> "np.ndarray":
    """Derivatives [N, P] of the logarithm of ``outcome`` by each of the values [P]."""
    unchanged, step = np.log(outcome(values)), 1e-4
    slopes = np.empty((len(unchanged), len(values)))
    for index in range(len(values)):
        shifted = values.copy()
        shifted[index] += step
        slopes[:, index] = (np.log(outcome(shifted)) - unchanged) / step
    return slopes


def check_complete(machine: Machine) -> None:
    """Refuses a machine whose handwritten file lacks facts or constants that the models need.

    Raises:
        UsageError: the file was written by ``plan probe`` or has counted cycles, or facts or constants are missing.
    """
    if machine.probed is not None:
        raise UsageError(
            f"machine {machine.name}: its file is from `plan probe` and describes runs of our own trainer, not rows; "
            "`plan time RUN.yaml --machine FILE.yaml` reads it"
        )
    if machine.counted is not None:
        raise UsageError(
            f"machine {machine.name}: has counted cycles, to which no rows are fitted; valid: {machine.base}"
        )
    missing = [f"facts {name}" for name in FACTS if name not in machine.facts]
    missing += [f"time {name}" for name in TIME_CONSTANTS if name not in machine.time.values]
    missing += [f"memory {name}" for name in MEMORY_CONSTANTS if name not in machine.memory.values]
    if missing:
        raise UsageError(f"machine {machine.name}: its file lacks {', '.join(missing)}")


def time_problem(machine: Machine, measured_rows: Sequence[MeasuredRow]) -> _FitProblem:
    """The fitting problem of rows with measured seconds; a measurement in several tables is fitted once.

    If the model depends on how full the memory is, that comes from the machine's model of memory.
    """
    chosen = [measured_row for measured_row in measured_rows if measured_row[1].seconds]

    def predict(work: Work, constants: Mapping[str, float]) -> Tuple["np.ndarray", "np.ndarray"]:
        predicted = iteration_seconds(work, constants, machine.facts)
        return predicted, predicted

    problem = _FitProblem(
        fitted=machine.time,
        measured_rows=tuple(chosen),
        work=count_work([row for row, _ in chosen], machine.facts),
        predict=predict,
        target=np.log([measured.seconds or np.nan for _, measured in chosen]),
        weight=np.array([1.0 if measured.status == "ok" else _ESTIMATED for _, measured in chosen]),
        capacity=_capacities(machine, chosen),
        out_of_memory=np.zeros(len(chosen), dtype=bool),
        repeated=_mark_repeated(chosen, lambda measured: measured.seconds),
        of_memory=False,
    )
    if "memory_pressure" not in machine.time.values:
        return problem
    memory = memory_problem(machine, measured_rows)
    return replace(problem, memory=memory).with_fullness(memory.initial_values)


def memory_problem(machine: Machine, measured_rows: Sequence[MeasuredRow]) -> _FitProblem:
    """The fitting problem of rows with measured memory, and of rows that are known to have had enough memory or not."""
    scored = [
        measured_row
        for measured_row in measured_rows
        if measured_row[1].out_of_memory or measured_row[1].status == "ok"
    ]
    chosen = [(row, _in_unit(row, measured, machine.memory_unit)) for row, measured in scored]

    def predict(work: Work, constants: Mapping[str, float]) -> Tuple["np.ndarray", "np.ndarray"]:
        return footprint(work, constants, machine.facts, machine.memory_unit, machine.memory_of == "node")

    readings = [measured.memory if measured.memory and not measured.out_of_memory else np.nan for _, measured in chosen]
    return _FitProblem(
        fitted=machine.memory,
        measured_rows=tuple(chosen),
        work=count_work([row for row, _ in chosen], machine.facts),
        predict=predict,
        target=np.log(readings),
        weight=np.ones(len(chosen)),
        capacity=_capacities(machine, chosen),
        out_of_memory=np.array([measured.out_of_memory for _, measured in chosen], dtype=bool),
        repeated=_mark_repeated(chosen, lambda measured: (measured.memory, measured.out_of_memory)),
        of_memory=True,
    )


def _in_unit(row: ConfigRow, measured: Measurement, unit: str) -> Measurement:
    """The measurement with its memory in the given unit, and without memory if the row's unit is not known."""
    row_unit = unit_of(row.mem_unit, unit)
    if measured.memory is None or row_unit == unit:
        return measured
    return replace(measured, memory=measured.memory * UNIT_BYTES[row_unit] / UNIT_BYTES[unit] if row_unit else None)


def _capacities(machine: Machine, measured_rows: Sequence[MeasuredRow]) -> "np.ndarray":
    return np.array([machine.capacity(row.hardware) for row, _ in measured_rows])


def _mark_repeated(measured_rows: Sequence[MeasuredRow], reading: Callable[[Measurement], Any]) -> "np.ndarray":
    """True [N] if an earlier row has the same configuration and reading."""
    seen_keys = set()
    repeated = np.zeros(len(measured_rows), dtype=bool)
    for index, (row, measured) in enumerate(measured_rows):
        read = reading(measured)
        key = (row.hardware, row.configuration_key, round(read, 1) if isinstance(read, float) else read)
        repeated[index] = key in seen_keys
        seen_keys.add(key)
    return repeated


def predict_left_out(problem: _FitProblem, by: str, start: "np.ndarray") -> List[LeftOutPrediction]:
    """Predicts each row by a fit without its group and without the runs of that group in other tables.

    Args:
        by: one of :data:`GROUPS`.
        start: values of the fit to all rows.
    """
    keys = [GROUPS[by](row) for row, _ in problem.measured_rows]
    predictions: Dict[int, LeftOutPrediction] = {}
    for key in dict.fromkeys(keys):
        in_group = np.array([group_key == key for group_key in keys])
        group_runs = {row.run_key for (row, _), is_member in zip(problem.measured_rows, in_group) if is_member}

        def outside_group(
            subset: _FitProblem, key: object = key, runs: "Set[Tuple[object, ...]]" = group_runs
        ) -> "np.ndarray":
            return np.array([GROUPS[by](row) != key and row.run_key not in runs for row, _ in subset.measured_rows])

        rest = problem.select(outside_group(problem))
        fitted = rest.fit(start)
        ranges = input_ranges_of([row for row, _ in rest.measured_rows])
        group_problem = problem.select(in_group)
        memory = problem.memory
        if memory is not None:
            group_problem = group_problem.with_fullness(
                memory.select(outside_group(memory)).fit(memory.initial_values).values
            )
        predicted, peak = group_problem.outcome(fitted.values)
        widths = group_problem.widths(fitted)
        for index, row_index in enumerate(np.flatnonzero(in_group)):
            row, measured = group_problem.measured_rows[index]
            numbers = (
                float(predicted[index]),
                float(peak[index]),
                float(widths[index]),
                extrapolation_distance(extrapolated_inputs(row, ranges)),
            )
            predictions[int(row_index)] = LeftOutPrediction(
                row, measured, *numbers, repeated=bool(group_problem.repeated[index])
            )
    return [predictions[index] for index in range(len(keys))]


def interval_spread(rows: Sequence[LeftOutPrediction]) -> float:
    """The spread for which, together with each prediction's width, 80 % intervals cover 80 % of the rows."""
    return _least_covering(rows, lambda spread: [np.hypot(prediction.width, spread) for prediction in rows])


def beyond_spread(rows: Sequence[LeftOutPrediction], spread: float) -> float:
    """The growth of intervals for each factor of e outside of the fitted ranges that covers 80 % of the rows there.

    Args:
        rows: rows that all lie outside of the ranges of the rows that they were predicted from.
        spread: the result of :func:`interval_spread`.
    """
    growth = _least_covering(
        rows, lambda more: [total_width(prediction.width, spread, more, prediction.distance) for prediction in rows]
    )
    return max(_LEAST_BEYOND_SPREAD, growth)


def _least_covering(
    rows: Sequence[LeftOutPrediction], widths: Callable[[float], Sequence[float]], share: float = 0.8
) -> float:
    """The least argument of ``widths`` for which 80 % intervals cover ``share`` of the rows."""
    log_errors = np.array(
        [abs(np.log(prediction.predicted / (prediction.measured.seconds or np.nan))) for prediction in rows]
    )
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        covered_share = np.mean(log_errors <= NORMAL_80 * np.array(widths(middle)))
        low, high = (low, middle) if covered_share >= share else (middle, high)
    return high


@dataclass(frozen=True)
class Refit:
    """A refitted machine, and the predictions of its models for rows that were left out of the fit."""

    machine: Machine
    seconds: Dict[str, List[LeftOutPrediction]]
    memory: Dict[str, List[LeftOutPrediction]]


def refit(machine: Machine, measured_rows: Sequence[MeasuredRow], groups: Sequence[str] = tuple(GROUPS)) -> Refit:
    """Fits both models of a machine to rows, and predicts left-out groups with each.

    The rows left out by configuration set the width of intervals; the rows left out by table that lie outside of the
    fitted ranges set its growth there, if these are among the groups.

    Raises:
        UsageError: see :func:`check_complete`.
    """
    check_complete(machine)
    memory = memory_problem(machine, measured_rows)
    memory_fit = memory.fit()
    machine = replace(machine, memory=memory.fitted_by(memory_fit))
    time = time_problem(machine, measured_rows)
    time_fit = time.fit()
    seconds_out = {by: predict_left_out(time, by, time_fit.values) for by in groups}
    memory_out = {by: predict_left_out(memory, by, memory_fit.values) for by in groups}
    time_fitted = time.fitted_by(time_fit)
    scored = {
        by: [prediction for prediction in rows if prediction.measured.status == "ok" and not prediction.repeated]
        for by, rows in seconds_out.items()
    }
    if "configuration" in scored:
        time_fitted = replace(time_fitted, interval_spread=interval_spread(scored["configuration"]))
    outside_ranges = [prediction for prediction in scored.get("table", []) if prediction.distance > 0]
    if outside_ranges:
        time_fitted = replace(time_fitted, beyond_spread=beyond_spread(outside_ranges, time_fitted.interval_spread))
    return Refit(replace(machine, time=time_fitted), seconds_out, memory_out)
