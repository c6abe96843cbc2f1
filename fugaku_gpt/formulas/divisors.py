"""Divisors of whole numbers: sizes that share something out evenly."""

from __future__ import annotations

import math
from typing import List


def divisors_of(number: int) -> List[int]:
    """All divisors, ascending."""
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]
