"""Which class of operators makes one side slower than the other."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

from fugaku_gpt.records.operators import CLASSES, Operators

COLUMNS = ("class", "seconds a", "seconds b", "ratio", "share of the difference")
WHOLE = "iteration"
_DIGITS = 4  # significant ones of seconds
# a difference of iterations below this, relative to the first side's, is not shared out: noise divided by noise
_EQUAL = 0.01


def operator_rows(a: Sequence[Operators], b: Sequence[Operators]) -> List[Dict[str, Any]]:
    """A row for each class that takes time on either side, and one for the iteration, by :data:`COLUMNS`: seconds per
    iteration, each the mean over a side's jobs; b over a; and what part of b's iteration minus a's the class makes, of
    which all together are 1 and some may be negative. A ratio is None where a has none of a class, a share where the
    iterations differ by less than 1 %.

    Raises:
        ValueError: a side has no jobs.
    """
    if not a or not b:
        raise ValueError("each side needs the operators of at least one job")
    first, second = _means(a), _means(b)
    difference = second[WHOLE] - first[WHOLE]
    shares = abs(difference) >= _EQUAL * first[WHOLE]
    return [
        {
            "class": name,
            "seconds a": _rounded(first[name]),
            "seconds b": _rounded(second[name]),
            "ratio": round(second[name] / first[name], 3) if first[name] > 0 else None,
            "share of the difference": round((second[name] - first[name]) / difference, 3) if shares else None,
        }
        for name in (*CLASSES, WHOLE)
        if first[name] > 0 or second[name] > 0
    ]


def explanation(a: Sequence[Operators], b: Sequence[Operators]) -> str:
    """What explains the difference between the two sides, in one sentence.

    Raises:
        ValueError: a side has no jobs.
    """
    rows = {row["class"]: row for row in operator_rows(a, b)}
    whole = rows.pop(WHOLE)
    if whole["share of the difference"] is None:
        return f"the profiled iterations differ by less than {_EQUAL:.0%}: no class of operators explains anything"
    slower = whole["seconds b"] > whole["seconds a"]
    most = max(rows.values(), key=lambda row: float(row["share of the difference"]))
    gained = abs(most["seconds b"] - most["seconds a"])
    words = (
        f"{most['class']} explains {most['share of the difference']:.0%} of the difference: "
        f"B takes {gained:.3g} s {'more' if slower else 'less'} of it per iteration"
    )
    times = most["ratio"]
    if times is not None and times > 0:
        words += f" ({times:.2f} times A's)"
    against = min(rows.values(), key=lambda row: float(row["share of the difference"]))
    if against["share of the difference"] < -0.1:
        words += f"; {against['class']} goes the other way ({-against['share of the difference']:.0%})"
    return words


def slowdown(sides: Sequence[Operators]) -> float:
    """How many times as long an iteration takes because it is profiled: the geometric mean over jobs."""
    return math.exp(math.fsum(math.log(one.slowdown) for one in sides) / len(sides))


def _means(jobs: Sequence[Operators]) -> Dict[str, float]:
    means = {name: math.fsum(job.classes[name] for job in jobs) / len(jobs) for name in CLASSES}
    means[WHOLE] = math.fsum(job.seconds_per_iteration for job in jobs) / len(jobs)
    return means


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
