"""Explains which class of operators makes one side slower than the other."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

from fugaku_gpt.records.operators import CLASSES, Operators

COLUMNS = ("class", "seconds a", "seconds b", "ratio", "share of the difference")
_DIGITS = 4  # significant digits of seconds
# a smaller difference of iterations, relative to side A, is not divided into shares: noise over noise
_MIN_DIFFERENCE = 0.01
_OPPOSING_SHARE = -0.1  # a class with this share or less opposes the difference, and is reported


def operator_rows(a: Sequence[Operators], b: Sequence[Operators]) -> List[Dict[str, Any]]:
    """Returns a row with :data:`COLUMNS` for each class that takes time on either side.

    Seconds per iteration are means over a side's jobs; the ratio is b over a; the share is the class's part of the
    difference between the iterations of b and a. Shares add up to 1, and some may be negative. A ratio is None where a
    spends no time in a class, a share is None where the iterations differ by less than 1 %.

    Raises:
        ValueError: a side has no jobs.
    """
    means_a, means_b = _class_means(a), _class_means(b)
    seconds = _iteration_seconds(a), _iteration_seconds(b)
    is_explainable = _is_difference_explainable(*seconds)
    return [
        {
            "class": name,
            "seconds a": float(f"{means_a[name]:.{_DIGITS}g}"),
            "seconds b": float(f"{means_b[name]:.{_DIGITS}g}"),
            "ratio": round(means_b[name] / means_a[name], 3) if means_a[name] > 0 else None,
            "share of the difference": (
                round((means_b[name] - means_a[name]) / (seconds[1] - seconds[0]), 3) + 0.0
                if is_explainable
                else None  # no -0.0
            ),
        }
        for name in CLASSES
        if means_a[name] > 0 or means_b[name] > 0
    ]


def explanation(a: Sequence[Operators], b: Sequence[Operators]) -> str:
    """Explains the difference between the two sides by one class, in a sentence.

    Raises:
        ValueError: a side has no jobs.
    """
    means_a, means_b = _class_means(a), _class_means(b)
    seconds = _iteration_seconds(a), _iteration_seconds(b)
    times = f"{seconds[1]:.4g} s and {seconds[0]:.4g} s"
    if not _is_difference_explainable(*seconds):
        return f"profiled iterations of B and A differ by less than {_MIN_DIFFERENCE:.0%} ({times}): nothing to explain"
    shares = {name: (means_b[name] - means_a[name]) / (seconds[1] - seconds[0]) for name in CLASSES}
    most, least = max(shares, key=lambda name: shares[name]), min(shares, key=lambda name: shares[name])
    factor = f", {means_b[most] / means_a[most]:.2f} times A's" if means_a[most] > 0 and means_b[most] > 0 else ""
    opposing = ""
    if shares[least] < _OPPOSING_SHARE:
        opposing = f"; {least} goes the other way, by {abs(means_b[least] - means_a[least]):.3g} s"
    direction = "more" if means_b[most] > means_a[most] else "less"
    return (
        f"{most} explains {shares[most]:.0%} of the difference between profiled iterations of B and A ({times}): "
        f"{abs(means_b[most] - means_a[most]):.3g} s {direction}{factor}{opposing}"
    )


def slowdown(jobs: Sequence[Operators]) -> float:
    """Time of a profiled iteration over that of an unprofiled one: the geometric mean over jobs."""
    return math.exp(math.fsum(math.log(job.slowdown) for job in jobs) / len(jobs))


def _class_means(jobs: Sequence[Operators]) -> Dict[str, float]:
    """Seconds per iteration of each class, as means over jobs."""
    if not jobs:
        raise ValueError("a side needs the operators of at least one job")
    return {name: math.fsum(job.classes[name] for job in jobs) / len(jobs) for name in CLASSES}


def _iteration_seconds(jobs: Sequence[Operators]) -> float:
    """Seconds per iteration, as a mean over jobs."""
    return math.fsum(job.seconds_per_iteration for job in jobs) / len(jobs)


def _is_difference_explainable(a: float, b: float) -> bool:
    """True if two times of iterations differ enough to divide the difference into shares."""
    return abs(b - a) >= _MIN_DIFFERENCE * a
