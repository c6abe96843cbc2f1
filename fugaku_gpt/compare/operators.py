"""Which class of operators makes one side slower than the other."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

from fugaku_gpt.records.operators import CLASSES, Operators

COLUMNS = ("class", "seconds a", "seconds b", "ratio", "share of the difference")
_DIGITS = 4  # significant ones of seconds
# a difference of iterations below this, relative to the first side's, is not shared out: noise divided by noise
_EQUAL = 0.01
_AGAINST = -0.1  # share of the difference from which on a class that goes the other way is told


def operator_rows(a: Sequence[Operators], b: Sequence[Operators]) -> List[Dict[str, Any]]:
    """A row by :data:`COLUMNS` for each class that takes time on either side: seconds per iteration, each the mean over
    a side's jobs; b over a; and what part of the whole difference, b's iteration minus a's, the class makes. All
    shares together are 1, and some may be negative.

    A ratio is None where a has none of a class, a share where the iterations differ by less than 1 %.

    Raises:
        ValueError: a side has no jobs.
    """
    first, second = _means(a), _means(b)
    whole = _whole(a), _whole(b)
    differ = _differ(*whole)
    return [
        {
            "class": name,
            "seconds a": float(f"{first[name]:.{_DIGITS}g}"),
            "seconds b": float(f"{second[name]:.{_DIGITS}g}"),
            "ratio": round(second[name] / first[name], 3) if first[name] > 0 else None,
            "share of the difference": (
                round((second[name] - first[name]) / (whole[1] - whole[0]), 3) + 0.0 if differ else None  # no -0.0
            ),
        }
        for name in CLASSES
        if first[name] > 0 or second[name] > 0
    ]


def explanation(a: Sequence[Operators], b: Sequence[Operators]) -> str:
    """Which class explains the difference between the two sides, in one sentence.

    Raises:
        ValueError: a side has no jobs.
    """
    first, second = _means(a), _means(b)
    whole = _whole(a), _whole(b)
    told = f"{whole[1]:.4g} s and {whole[0]:.4g} s"
    if not _differ(*whole):
        return f"profiled iterations of B and A differ by less than {_EQUAL:.0%} ({told}): nothing to explain"
    shares = {name: (second[name] - first[name]) / (whole[1] - whole[0]) for name in CLASSES}
    most, least = max(shares, key=lambda name: shares[name]), min(shares, key=lambda name: shares[name])
    times = f", {second[most] / first[most]:.2f} times A's" if first[most] > 0 and second[most] > 0 else ""
    against = ""
    if shares[least] < _AGAINST:
        against = f"; {least} goes the other way, by {abs(second[least] - first[least]):.3g} s"
    return (
        f"{most} explains {shares[most]:.0%} of the difference between profiled iterations of B and A ({told}): "
        f"{abs(second[most] - first[most]):.3g} s {'more' if second[most] > first[most] else 'less'}{times}{against}"
    )


def slowdown(sides: Sequence[Operators]) -> float:
    """How many times as long an iteration takes because it is profiled: the geometric mean over jobs."""
    return math.exp(math.fsum(math.log(one.slowdown) for one in sides) / len(sides))


def _means(jobs: Sequence[Operators]) -> Dict[str, float]:
    """Seconds per iteration of each class."""
    if not jobs:
        raise ValueError("a side needs the operators of at least one job")
    return {name: math.fsum(job.classes[name] for job in jobs) / len(jobs) for name in CLASSES}


def _whole(jobs: Sequence[Operators]) -> float:
    """Seconds per iteration."""
    return math.fsum(job.seconds_per_iteration for job in jobs) / len(jobs)


def _differ(a: float, b: float) -> bool:
    """Whether two times of iterations differ by so much that it can be shared out."""
    return abs(b - a) >= _EQUAL * a
