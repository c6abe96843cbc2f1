"""Student's t distribution, for a login node that has NumPy and no SciPy; held equal to SciPy's in the tests.

The tail is the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, evaluated as in Lentz
1976); the quantile is found in it by bisection.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_ENOUGH = 1e-15
_ROUNDS = 500


def two_sided(t: float, df: float) -> float:
    """Probability that |T| is at least ``t`` with ``df`` degrees of freedom."""
    if math.isinf(t):
        return 0.0
    return _beta(df / 2, 0.5, df / (df + t * t))


@lru_cache(maxsize=1024)
def reach(confidence: float, df: float) -> float:
    """The t within whose both signs T lies with this probability: 2.776 of 0.95 and 4 degrees of freedom."""
    low, high = 0.0, 1.0
    while two_sided(high, df) > 1 - confidence:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, df) > 1 - confidence else (low, middle)
    return (low + high) / 2


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # there the fraction of the other side converges fast
        return 1 - _beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _ROUNDS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _not_zero(1 + factor * d)
            c = _not_zero(1 + factor / c)
            value *= c * d
        if abs(c * d - 1) < _ENOUGH:
            break
    return front * value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
