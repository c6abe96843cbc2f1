"""The figures of the run page: titles, units, and the columns of metrics that they draw."""

from __future__ import annotations

import math
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from fugaku_gpt.harmless import harmless
from fugaku_gpt.report.run_series import Columns, RunSeries
from fugaku_gpt.report.thinning import gap_starts, thin

EVALUATION_PREFIX = "evaluation:"  # of the key of a figure of one evaluated file
MOST_EVALUATIONS = 10
_LOSS_DIGITS, _DIGITS = 9, 6  # significant ones; differences of losses are small
_GIB = 2.0**-30


class Figure(NamedTuple):
    """A plot of the page.

    Attributes:
        key: name of its curves.
        title: title, for a person.
        unit: unit of the values; empty if they have none.
        column: name in the lines of metrics.
        factor: factor from the metric to the unit.
        is_validation: whether the lines are those of kind ``validation``, else of kind ``iteration``.
        rank: column with the rank that a value is of; empty if it is of all.
        is_setting: whether it is a setting, which is drawn only if it changes.
    """

    key: str
    title: str
    unit: str = ""
    column: str = ""
    factor: float = 1.0
    is_validation: bool = False
    rank: str = ""
    is_setting: bool = False


FIGURES = (
    Figure("loss", "Training loss", column="loss"),
    Figure("validation", "Validation loss", column="loss", is_validation=True),
    Figure("accuracy", "Training accuracy", "%", "accuracy", 100.0),
    Figure("validation_accuracy", "Validation accuracy", "%", "accuracy", 100.0, is_validation=True),
    Figure("lr", "Learning rate", column="lr"),
    Figure("grad_norm", "Gradient norm", column="grad_norm"),
    Figure("seconds", "Time of an iteration", "s", "seconds"),
    Figure("tokens_per_second", "Throughput", "tokens/s", "tokens_per_second"),
    Figure("images_per_second", "Throughput of images", "images/s", "images_per_second"),
    Figure("tflops_notes", "Rate per node, formula of the notes", "TFLOP/s", "tflops_notes"),
    Figure("tflops_exact", "Rate per node, exact formula", "TFLOP/s", "tflops_exact"),
    Figure("rss_max", "Memory of the largest rank", "GiB", "rss_max_bytes", _GIB),
    Figure("node_used", "Used memory of a node", "GiB", "node_used_bytes", _GIB),
    Figure("hidden_communication", "Hidden communication", "%", "hidden_communication", 100.0),
    Figure("bubble", "Pipeline bubble, mean of the stages", "% of busy time", "bubble", 100.0),
    Figure("bubble_max", "Pipeline bubble, idlest stage", "% of busy time", "bubble_max", 100.0),
    Figure("compute_max", "Computing, slowest rank", "s/iteration", "compute_max", rank="compute_max_rank"),
    Figure("compute_min", "Computing, fastest rank", "s/iteration", "compute_min", rank="compute_min_rank"),
    Figure("global_batch", "Global batch", "samples", "global_batch", is_setting=True),
    Figure("seq_len", "Sequence length", "tokens", "actual_seq_len", is_setting=True),
    Figure("loss_scale", "Loss scale", column="loss_scale", is_setting=True),
)
TOKENS, ELAPSED = "tokens", "elapsed"  # curves that are no figures, but positions: consumed tokens, seconds


class Curve(NamedTuple):
    """Points of a curve.

    Attributes:
        at: iterations, ascending, float64 [points].
        values: float64 [points]; not finite where a loss was not.
        ranks: float64 [points], of a figure of single ranks; else None.
        digits: significant digits that are worth showing.
        after: points of later iterations that a reader already has are replaced by these; NaN: these are all points.
    """

    at: "np.ndarray"
    values: "np.ndarray"
    ranks: Optional["np.ndarray"]
    digits: int
    after: float

    def thinned(self, most: int) -> "Curve":
        """The same curve with this many points at most, 6 at least (see :func:`fugaku_gpt.report.thinning.thin`); of
        values that are not finite, the first of each of the longest stretches remains, so that no line crosses them."""
        if len(self.at) <= most:
            return self
        gaps = gap_starts(self.values, most // 4)
        rows = np.sort(np.concatenate((thin(self.at, self.values, most - len(gaps)), gaps)))
        ranks = self.ranks[rows] if self.ranks is not None else None
        return self._replace(at=self.at[rows], values=self.values[rows], ranks=ranks)

    def values_for_json(self) -> Dict[str, object]:
        """Iterations as steps from the one before, values with few digits, null for what is not finite."""
        steps = np.diff(self.at, prepend=0.0)
        points: Dict[str, object] = {
            "steps": steps.astype(np.int64).tolist(),
            "values": [_short(value, self.digits) for value in self.values.tolist()],
        }
        if self.ranks is not None:
            points["ranks"] = [int(rank) if rank == rank else None for rank in self.ranks]
        if np.isfinite(self.after):
            points["after"] = int(self.after)
        return points


def curves_of(series: RunSeries, is_update: bool = False) -> Dict[str, Curve]:
    """The curves of a run by key; of an update only those points that have changed since :meth:`RunSeries.mark` was
    called, and none of curves that have not."""
    curves: Dict[str, Curve] = {}
    for figure in FIGURES:
        columns = series.validation if figure.is_validation else series.iterations
        curve = _curve(columns, figure, is_update)
        if curve is not None:
            curves[figure.key] = curve
    for name, columns in list(series.evaluations.items())[:MOST_EVALUATIONS]:
        curve = _curve(columns, Figure(name, name, column="loss"), is_update)
        if curve is not None:
            curves[EVALUATION_PREFIX + harmless(name)] = curve
    curves.update(_positions(series.iterations, is_update))
    return curves


def _curve(columns: Columns, figure: Figure, is_update: bool) -> Optional[Curve]:
    if figure.column not in columns.numbers or (is_update and not columns.is_changed):
        return None
    first = columns.lowest_length if is_update else 0
    at = np.array(columns.iterations[first:], dtype=np.float64)
    values = np.array(columns.numbers[figure.column][first:], dtype=np.float64) * figure.factor
    order = np.argsort(at, kind="stable")  # lines of a damaged file may be in any order
    if figure.column != "loss" or figure.is_validation:  # a loss that was not finite is a gap
        order = order[np.isfinite(values[order])]
    ranks = None
    if figure.rank in columns.numbers:
        ranks = np.array(columns.numbers[figure.rank][first:], dtype=np.float64)[order]
    digits = _LOSS_DIGITS if figure.column == "loss" else _DIGITS
    return Curve(at[order], values[order], ranks, digits, _after(columns, is_update))


def _positions(columns: Columns, is_update: bool) -> Iterator[Tuple[str, Curve]]:
    """The consumed tokens and the seconds of training by iteration, as curves."""
    curve = _curve(columns, Figure(TOKENS, "", column="consumed_tokens"), is_update)
    if curve is not None:
        yield TOKENS, curve._replace(digits=_LOSS_DIGITS)
    if "seconds" not in columns.numbers or (is_update and not columns.is_changed):
        return
    at = np.array(columns.iterations, dtype=np.float64)
    seconds = np.nan_to_num(np.array(columns.numbers["seconds"], dtype=np.float64))
    elapsed = np.cumsum(seconds * np.maximum(0.0, np.diff(at, prepend=0.0)))
    first = columns.lowest_length if is_update else 0
    yield ELAPSED, Curve(at[first:], elapsed[first:], None, _LOSS_DIGITS, _after(columns, is_update))


def _after(columns: Columns, is_update: bool) -> float:
    """The last iteration that is unchanged since the columns were marked."""
    if not is_update:
        return float("nan")
    return columns.iterations[columns.lowest_length - 1] if columns.lowest_length else -1.0


def stragglers(series: RunSeries, most: int = 3) -> List[Dict[str, object]]:
    """The ranks that were the slowest most often: rank, node, the share of the lines, and by how much the slowest rank
    computed longer than the fastest in them, on average; empty where no line names a rank."""
    numbers = series.iterations.numbers
    if any(name not in numbers for name in ("compute_max_rank", "compute_max", "compute_min")):
        return []
    ranks = np.array(numbers["compute_max_rank"], dtype=np.float64)
    slowest, fastest = np.array(numbers["compute_max"]), np.array(numbers["compute_min"])
    nodes = series.iterations.texts.get("compute_max_node")
    counted = np.isfinite(ranks) & np.isfinite(slowest) & (fastest > 0)
    names, counts = np.unique(ranks[counted], return_counts=True)
    rows: List[Dict[str, object]] = []
    for index in np.argsort(-counts, kind="stable")[:most]:
        of_rank = np.flatnonzero(counted & (ranks == names[index]))
        excess = float(np.mean(slowest[of_rank] / fastest[of_rank] - 1))
        rows.append(
            {
                "rank": int(names[index]),
                "node": harmless(nodes[int(of_rank[-1])]) if nodes is not None else "",
                "share": _short(float(counts[index] / counts.sum()), 3),
                "excess": _short(excess, 3),
            }
        )
    return rows


def _short(value: float, digits: int) -> Optional[float]:
    """A number for JSON with this many significant digits; None if it is not finite."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
