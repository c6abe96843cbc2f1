"""Student's t distribution, for a login node that has NumPy and no SciPy; tested against SciPy's.

The tail is the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, evaluated as in Lentz
1976); the quantile is computed by Newton's method on a double logarithmic scale, where the tail is
concave, so that it converges from any start.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_PRECISION = 1e-15
_MAX_STEPS = 500


def two_sided_p(t: float, df: float) -> float:
    """Probability that abs(T) is at least ``t`` with ``df`` degrees of freedom."""
    if math.isinf(t):
        return 0.0
    return _beta(df / 2, 0.5, df / (df + t * t))


@lru_cache(maxsize=1024)
def t_quantile(confidence: float, df: float) -> float:
    """The t with abs(T) <= t with probability ``confidence``: 2.776 for 0.95 and 4 degrees of freedom."""
    log_tail = math.log1p(-confidence)
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) * 2 / math.sqrt(df * math.pi)
    u = 0.0
    for _ in range(_MAX_STEPS):
        t = math.exp(u)
        tail = two_sided_p(t, df)
        slope = -scale * t * math.exp(-(df + 1) / 2 * math.log1p(t * t / df)) / tail
        step = max(-1.0, min(1.0, (log_tail - math.log(tail)) / slope))  # far out, a tail may underflow to 0
        u += step
        if abs(step) < 1e-13:
            break
    return math.exp(u)


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the continued fraction of the other side converges faster
        return 1 - _beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MAX_STEPS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _not_zero(1 + factor * d)
            c = _not_zero(1 + factor / c)
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return front * value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
