"""Scores predictions: errors, order within a table, the best row, intervals, runs that ran out of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.planner.intervals import NORMAL_80, total_width
from fugaku_gpt.planner.tables.fitting import GROUPS, LeftOutPrediction, Refit
from fugaku_gpt.planner.tables.rows import ConfigRow, table_name

FIGURES = (
    "machine",
    "left_out_by",
    "rows",
    "median",
    "p90",
    "baseline_median",
    "tau",
    "pairs_in_order",
    "best_costs",
    "held_by_80",
    "held_outside",
    "repeats",
    "memory_rows",
    "memory_median",
    "memory_p90",
    "oom_found",
    "false_alarms",
)
PAIR_GAP = 0.02  # measured times that are closer to each other than this have no order


@dataclass(frozen=True)
class TimedRow:
    """One row's predicted and measured seconds, and its table; ``repeated`` says that an earlier table has it too."""

    table: str
    predicted: float
    measured: float
    low: float
    high: float
    repeated: bool = False

    @property
    def is_within_interval(self) -> bool:
        """True if the predicted interval contains the measured seconds."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class TimeScore:
    """Figures of merit of predicted seconds.

    Errors, as shares of the measured value, and ``coverage`` (the share of rows within their interval) are for rows
    that repeat no other row; figures of order are for all rows. ``tau`` (Kendall's tau-b) is the mean over tables of
    three rows and more, None if there is none. ``best_costs`` is by how much the row that is predicted to be the
    fastest is slower than the fastest, for the worst table.
    """

    rows: int
    median: float
    p90: float
    tau: Optional[float]
    pairs_in_order: Optional[float]
    best_costs: float
    coverage: float


def score_times(rows: Sequence[TimedRow]) -> TimeScore:
    """The figures of merit of predicted seconds."""
    distinct = [row for row in rows if not row.repeated]
    errors = np.array([abs(row.predicted / row.measured - 1) for row in distinct])
    tables: Dict[str, List[TimedRow]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    taus, ordered_pairs, all_pairs, costs = [], 0, 0, 0.0
    for repeated in tables.values():
        members = _distinct(repeated)
        tau = kendall_tau([row.predicted for row in members], [row.measured for row in members])
        if tau is not None and len(members) >= 3:
            taus.append(tau)
        ordered, pairs = pairs_in_order(members)
        ordered_pairs, all_pairs = ordered_pairs + ordered, all_pairs + pairs
        chosen = min(members, key=lambda row: row.predicted)
        costs = max(costs, chosen.measured / min(row.measured for row in members) - 1)
    return TimeScore(
        rows=len(distinct),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        tau=float(np.mean(taus)) if taus else None,
        pairs_in_order=ordered_pairs / all_pairs if all_pairs else None,
        best_costs=costs,
        coverage=float(np.mean([row.is_within_interval for row in distinct])),
    )


def _distinct(rows: Sequence[TimedRow]) -> List[TimedRow]:
    """Merges rows with the same prediction into one row with their mean measurement.

    They are one configuration that was measured several times, and no model can order them.
    """
    same: Dict[float, List[TimedRow]] = {}
    for row in rows:
        same.setdefault(row.predicted, []).append(row)
    return [
        replace(same_rows[0], measured=float(np.mean([row.measured for row in same_rows])))
        for same_rows in same.values()
    ]


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> Optional[float]:
    """Kendall's tau-b, which leaves ties out; None if one of the two sequences has only ties."""
    agreement, firsts, seconds = 0, 0, 0
    for (a, b), (c, d) in combinations(list(zip(first, second)), 2):
        first_sign, second_sign = int(np.sign(a - c)), int(np.sign(b - d))
        agreement += first_sign * second_sign
        firsts += first_sign * first_sign
        seconds += second_sign * second_sign
    return agreement / float(np.sqrt(firsts * seconds)) if firsts and seconds else None


def pairs_in_order(rows: Sequence[TimedRow]) -> Tuple[int, int]:
    """The number of pairs that are predicted in their order, and the number of pairs that have an order."""
    ordered = pairs = 0
    for first, second in combinations(rows, 2):
        if abs(first.measured - second.measured) <= PAIR_GAP * min(first.measured, second.measured):
            continue
        pairs += 1
        ordered += (first.predicted - second.predicted) * (first.measured - second.measured) > 0
    return ordered, pairs


def score_figures(refit: Refit, by: str) -> Dict[str, Any]:
    """The columns :data:`FIGURES` for rows left out by ``by``.

    Errors are shares; rows that did not end well, and those that their tables call estimated, are not counted among the
    errors of time. ``held_outside`` is for rows outside of the ranges that they were predicted from, and ``repeats`` is
    the result of :func:`repeat_deviation`.
    """
    machine = refit.machine
    timed = [prediction for prediction in refit.seconds[by] if prediction.measured.status == "ok"]
    score = score_times([_timed_row(prediction, refit) for prediction in timed])
    outside_ranges = [
        _timed_row(prediction, refit) for prediction in timed if prediction.distance > 0 and not prediction.repeated
    ]
    noise = repeat_deviation(timed)
    distinct = [prediction for prediction in refit.memory[by] if not prediction.repeated]
    memory = [
        prediction for prediction in distinct if prediction.measured.memory and not prediction.measured.out_of_memory
    ]
    errors = np.array([abs(prediction.predicted / (prediction.measured.memory or np.nan) - 1) for prediction in memory])
    out_of_memory = [prediction for prediction in distinct if prediction.measured.out_of_memory]
    enough_memory = [prediction for prediction in distinct if not prediction.measured.out_of_memory]
    baseline = _baseline_error([prediction for prediction in timed if not prediction.repeated], by)
    full = {id(prediction): prediction.peak > machine.job_capacity(prediction.row.hardware) for prediction in distinct}
    return {
        "machine": machine.name,
        "left_out_by": by,
        "rows": score.rows,
        "median": round(score.median, 4),
        "p90": round(score.p90, 4),
        "baseline_median": None if baseline is None else round(baseline, 4),
        "tau": None if score.tau is None else round(score.tau, 3),
        "pairs_in_order": None if score.pairs_in_order is None else round(score.pairs_in_order, 3),
        "best_costs": round(score.best_costs, 4),
        "held_by_80": round(score.coverage, 3),
        "held_outside": f"{sum(row.is_within_interval for row in outside_ranges)} of {len(outside_ranges)}",
        "repeats": None if noise is None else round(noise, 4),
        "memory_rows": len(memory),
        "memory_median": round(float(np.median(errors)), 4) if memory else None,
        "memory_p90": round(float(np.quantile(errors, 0.9)), 4) if memory else None,
        "oom_found": f"{sum(full[id(prediction)] for prediction in out_of_memory)} of {len(out_of_memory)}",
        "false_alarms": f"{sum(full[id(prediction)] for prediction in enough_memory)} of {len(enough_memory)}",
    }


def repeat_deviation(rows: Sequence[LeftOutPrediction]) -> Optional[float]:
    """Standard deviation of the logarithm of seconds among repeated measurements of a configuration; None without any.

    No model that knows configurations alone can do better.
    """
    same: Dict[object, List[float]] = {}
    for prediction in rows:
        if not prediction.repeated and prediction.measured.seconds:
            same.setdefault(prediction.row.run_key, []).append(math.log(prediction.measured.seconds))
    repeated_logs = [np.array(logs) for logs in same.values() if len(logs) > 1]
    degrees_of_freedom = sum(len(logs) - 1 for logs in repeated_logs)
    return (
        math.sqrt(sum(float(np.sum((logs - logs.mean()) ** 2)) for logs in repeated_logs) / degrees_of_freedom)
        if degrees_of_freedom
        else None
    )


def interval_factor(prediction: LeftOutPrediction, refit: Refit) -> float:
    """The factor from predicted seconds to the upper end of their 80 % interval, and from the lower end to them."""
    time = refit.machine.time
    return float(
        np.exp(NORMAL_80 * total_width(prediction.width, time.interval_spread, time.beyond_spread, prediction.distance))
    )


def _timed_row(prediction: LeftOutPrediction, refit: Refit) -> TimedRow:
    factor, measured = interval_factor(prediction, refit), prediction.measured.seconds or float("nan")
    low, high = prediction.predicted / factor, prediction.predicted * factor
    return TimedRow(table_name(prediction.row.id), prediction.predicted, measured, low, high, prediction.repeated)


def _baseline_error(rows: Sequence[LeftOutPrediction], by: str) -> Optional[float]:
    """Median error if every row ran at the median FLOP/s of the rows outside its group; None for a single group."""
    keys = [GROUPS[by](prediction.row) for prediction in rows]
    seconds = np.array([prediction.measured.seconds for prediction in rows], dtype=float)
    rates = np.array([_flops(prediction.row) for prediction in rows]) / seconds
    errors = []
    for index, key in enumerate(keys):
        other_rates = [rate for rate, other_key in zip(rates, keys) if other_key != key]
        if other_rates:
            errors.append(abs(_flops(rows[index].row) / float(np.median(other_rates)) / seconds[index] - 1))
    return float(np.median(errors)) if errors else None


def _flops(row: ConfigRow) -> float:
    """FLOPs of an iteration per rank, including recomputation."""
    h, s = row.hidden, row.seq_len
    factor = 96 if row.recompute else 72
    logits = 6 * row.vocab / (factor * row.layers * h)
    total = factor * row.global_batch * s * row.layers * h * h * (1 + s / (6 * h) + logits)
    return total / (row.nodes * row.ranks_per_node)
