"""Formats recorded values as text."""

from __future__ import annotations

from typing import List, Sequence


def spans(numbers: Sequence[int]) -> str:
    """Format ascending integers as ranges: [0, 1, 2, 5] → ``0-2, 5``."""
    ranges: List[List[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
