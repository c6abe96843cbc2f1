"""Which class of operators makes one side slower than the other."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

from fugaku_gpt.records.operators import CLASSES, Operators

COLUMNS = ("class", "seconds a", "seconds b", "ratio", "share of the difference")
_DIGITS = 4  # significant ones of seconds
# a difference of iterations below this, relative to the first side's, is not shared out: noise divided by noise
_MIN_DIFFERENCE = 0.01
_OPPOSING_SHARE = -0.1  # share of the difference from which on a class that goes the other way is told


def operator_rows(a: Sequence[Operators], b: Sequence[Operators]) -> List[Dict[str, Any]]:
    """A row by :data:`COLUMNS` for each class that takes time on either side: seconds per iteration, each the mean over
    a side's jobs; b over a; and what part of the whole difference, b's iteration minus a's, the class makes. All
    shares together are 1, and some may be negative.

    A ratio is None where a has none of a class, a share where the iterations differ by less than 1 %.

    Raises:
        ValueError: a side has no jobs.
    """
    means_a, means_b = _class_means(a), _class_means(b)
    iteration_seconds = _iteration_seconds(a), _iteration_seconds(b)
    is_explainable = _is_difference_explainable(*iteration_seconds)
    return [
        {
            "class": name,
            "seconds a": float(f"{means_a[name]:.{_DIGITS}g}"),
            "seconds b": float(f"{means_b[name]:.{_DIGITS}g}"),
            "ratio": round(means_b[name] / means_a[name], 3) if means_a[name] > 0 else None,
            "share of the difference": (
                round((means_b[name] - means_a[name]) / (iteration_seconds[1] - iteration_seconds[0]), 3) + 0.0
                if is_explainable
                else None  # no -0.0
            ),
        }
        for name in CLASSES
        if means_a[name] > 0 or means_b[name] > 0
    ]


def explanation(a: Sequence[Operators], b: Sequence[Operators]) -> str:
    """Which class explains the difference between the two sides, in one sentence.

    Raises:
        ValueError: a side has no jobs.
    """
    means_a, means_b = _class_means(a), _class_means(b)
    iteration_seconds = _iteration_seconds(a), _iteration_seconds(b)
    seconds_text = f"{iteration_seconds[1]:.4g} s and {iteration_seconds[0]:.4g} s"
    if not _is_difference_explainable(*iteration_seconds):
        return f"profiled iterations of B and A differ by less than {_MIN_DIFFERENCE:.0%} ({seconds_text}): nothing to explain"
    shares = {name: (means_b[name] - means_a[name]) / (iteration_seconds[1] - iteration_seconds[0]) for name in CLASSES}
    most, least = max(shares, key=lambda name: shares[name]), min(shares, key=lambda name: shares[name])
    factor = f", {means_b[most] / means_a[most]:.2f} times A's" if means_a[most] > 0 and means_b[most] > 0 else ""
    opposing = ""
    if shares[least] < _OPPOSING_SHARE:
        opposing = f"; {least} goes the other way, by {abs(means_b[least] - means_a[least]):.3g} s"
    return (
        f"{most} explains {shares[most]:.0%} of the difference between profiled iterations of B and A ({seconds_text}): "
        f"{abs(means_b[most] - means_a[most]):.3g} s {'more' if means_b[most] > means_a[most] else 'less'}{factor}{opposing}"
    )


def slowdown(jobs: Sequence[Operators]) -> float:
    """How many times as long an iteration takes because it is profiled: the geometric mean over jobs."""
    return math.exp(math.fsum(math.log(job.slowdown) for job in jobs) / len(jobs))


def _class_means(jobs: Sequence[Operators]) -> Dict[str, float]:
    """Seconds per iteration of each class."""
    if not jobs:
        raise ValueError("a side needs the operators of at least one job")
    return {name: math.fsum(job.classes[name] for job in jobs) / len(jobs) for name in CLASSES}


def _iteration_seconds(jobs: Sequence[Operators]) -> float:
    """Seconds per iteration."""
    return math.fsum(job.seconds_per_iteration for job in jobs) / len(jobs)


def _is_difference_explainable(a: float, b: float) -> bool:
    """Whether two times of iterations differ by so much that it can be shared out."""
    return abs(b - a) >= _MIN_DIFFERENCE * a
