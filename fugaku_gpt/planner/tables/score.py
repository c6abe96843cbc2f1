"""How good predictions are: errors, order within a table, the best row, intervals, deaths of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.planner.intervals import NORMAL_80, total_width
from fugaku_gpt.planner.tables.fitting import GROUPS, Refit, SkippedSamples
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
PAIR_GAP = 0.02  # measured times nearer to each other than this have no order


@dataclass(frozen=True)
class Timed:
    """One row's predicted and measured seconds, and its table; ``repeated``: an earlier table shows it too."""

    table: str
    predicted: float
    measured: float
    low: float
    high: float
    repeated: bool = False

    @property
    def held(self) -> bool:
        """Whether its interval holds what was measured."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class TimeScore:
    """Errors, as shares of the measured value, and ``held`` are of the rows that repeat no other; order is of all.

    ``tau`` (Kendall's tau-b) is the mean over tables of three rows and more, None where there is none; ``best_costs``
    is how much more the row predicted to be best takes than the best, at worst over tables.
    """

    rows: int
    median: float
    p90: float
    tau: Optional[float]
    pairs_in_order: Optional[float]
    best_costs: float
    held: float


def score_times(rows: Sequence[Timed]) -> TimeScore:
    """The figures of merit of predicted seconds."""
    distinct = [row for row in rows if not row.repeated]
    off = np.array([abs(row.predicted / row.measured - 1) for row in distinct])
    tables: Dict[str, List[Timed]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    taus, good, all_pairs, costs = [], 0, 0, 0.0
    for repeated in tables.values():
        members = _distinct(repeated)
        tau = kendall_tau([row.predicted for row in members], [row.measured for row in members])
        if tau is not None and len(members) >= 3:
            taus.append(tau)
        ordered, pairs = pairs_in_order(members)
        good, all_pairs = good + ordered, all_pairs + pairs
        chosen = min(members, key=lambda row: row.predicted)
        costs = max(costs, chosen.measured / min(row.measured for row in members) - 1)
    return TimeScore(
        rows=len(distinct),
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        tau=float(np.mean(taus)) if taus else None,
        pairs_in_order=good / all_pairs if all_pairs else None,
        best_costs=costs,
        held=float(np.mean([row.held for row in distinct])),
    )


def _distinct(rows: Sequence[Timed]) -> List[Timed]:
    """Rows with one prediction, which are one configuration measured again, as one row with the mean of what they
    measured: no model can order them."""
    same: Dict[float, List[Timed]] = {}
    for row in rows:
        same.setdefault(row.predicted, []).append(row)
    return [replace(found[0], measured=float(np.mean([row.measured for row in found]))) for found in same.values()]


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> Optional[float]:
    """Kendall's tau-b, which leaves ties out; None where one of the two has no order at all."""
    agreement, firsts, seconds = 0, 0, 0
    for (a, b), (c, d) in combinations(list(zip(first, second)), 2):
        one, other = int(np.sign(a - c)), int(np.sign(b - d))
        agreement += one * other
        firsts += one * one
        seconds += other * other
    return agreement / float(np.sqrt(firsts * seconds)) if firsts and seconds else None


def pairs_in_order(rows: Sequence[Timed]) -> Tuple[int, int]:
    """Pairs predicted in their order, and pairs that have one."""
    good = pairs = 0
    for one, other in combinations(rows, 2):
        if abs(one.measured - other.measured) <= PAIR_GAP * min(one.measured, other.measured):
            continue
        pairs += 1
        good += (one.predicted - other.predicted) * (one.measured - other.measured) > 0
    return good, pairs


def figures(refit: Refit, by: str) -> Dict[str, Any]:
    """The columns :data:`FIGURES` for rows left out by ``by``. Errors are shares; rows that did not end well, and those
    that their tables call estimated, are not counted among the errors of time. ``held_outside`` is of rows outside of
    the hull of those that they were predicted from, ``repeats`` what :func:`repeats` says."""
    machine = refit.machine
    timed = [one for one in refit.seconds[by] if one.measured.status == "ok"]
    score = score_times([_timed(one, refit) for one in timed])
    beyond = [_timed(one, refit) for one in timed if one.beyond > 0 and not one.repeated]
    noise = repeats(timed)
    distinct = [one for one in refit.memory[by] if not one.repeated]
    memory = [one for one in distinct if one.measured.memory and not one.measured.out_of_memory]
    off = np.array([abs(one.predicted / (one.measured.memory or np.nan) - 1) for one in memory])
    died = [one for one in distinct if one.measured.out_of_memory]
    lived = [one for one in distinct if not one.measured.out_of_memory]
    baseline = _baseline([one for one in timed if not one.repeated], by)
    full = {id(one): one.peak > machine.capacity(one.row.hardware) for one in distinct}
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
        "held_by_80": round(score.held, 3),
        "held_outside": f"{sum(row.held for row in beyond)} of {len(beyond)}",
        "repeats": None if noise is None else round(noise, 4),
        "memory_rows": len(memory),
        "memory_median": round(float(np.median(off)), 4) if memory else None,
        "memory_p90": round(float(np.quantile(off, 0.9)), 4) if memory else None,
        "oom_found": f"{sum(full[id(one)] for one in died)} of {len(died)}",
        "false_alarms": f"{sum(full[id(one)] for one in lived)} of {len(lived)}",
    }


def repeats(rows: Sequence[SkippedSamples]) -> Optional[float]:
    """Standard deviation of the logarithm of seconds among measurements of one configuration, over all that were
    measured more than once; None where none was. No model that knows configurations alone can do better."""
    same: Dict[object, List[float]] = {}
    for one in rows:
        if not one.repeated and one.measured.seconds:
            same.setdefault(one.row.run_key, []).append(math.log(one.measured.seconds))
    again = [np.array(logs) for logs in same.values() if len(logs) > 1]
    free = sum(len(logs) - 1 for logs in again)
    return math.sqrt(sum(float(np.sum((logs - logs.mean()) ** 2)) for logs in again) / free) if free else None


def reach_of(one: SkippedSamples, refit: Refit) -> float:
    """The factor by which the 80 % interval of predicted seconds goes up and down."""
    time = refit.machine.time
    return float(np.exp(NORMAL_80 * total_width(one.width, time.interval_spread, time.beyond_spread, one.beyond)))


def _timed(one: SkippedSamples, refit: Refit) -> Timed:
    reach, measured = reach_of(one, refit), one.measured.seconds or float("nan")
    low, high = one.predicted / reach, one.predicted * reach
    return Timed(table_name(one.row.id), one.predicted, measured, low, high, one.repeated)


def _baseline(rows: Sequence[SkippedSamples], by: str) -> Optional[float]:
    """Median error if every row ran at the median FLOP/s of a device that the rows outside its group ran at; None where
    there is one group."""
    keys = [GROUPS[by](one.row) for one in rows]
    seconds = np.array([one.measured.seconds for one in rows], dtype=float)
    rates = np.array([_flops(one.row) for one in rows]) / seconds
    off = []
    for place, key in enumerate(keys):
        others = [rate for rate, other in zip(rates, keys) if other != key]
        if others:
            off.append(abs(_flops(rows[place].row) / float(np.median(others)) / seconds[place] - 1))
    return float(np.median(off)) if off else None


def _flops(row: ConfigRow) -> float:
    """FLOPs of an iteration per rank, recomputing counted."""
    h, s = row.hidden, row.seq_len
    factor = 96 if row.recompute else 72
    logits = 6 * row.vocab / (factor * row.layers * h)
    whole = factor * row.global_batch * s * row.layers * h * h * (1 + s / (6 * h) + logits)
    return whole / (row.nodes * row.ranks_per_node)
