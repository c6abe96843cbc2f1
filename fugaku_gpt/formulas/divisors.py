"""Divisors of integers: sizes that divide something evenly."""

from __future__ import annotations

import math
from typing import List


def divisors_of(number: int) -> List[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]
