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


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], has_rule: bool) -> List[str]:
    """Format cells as lines of aligned columns below their names, without blanks at the ends of lines.

    Args:
        has_rule: whether hyphens underline the names.
    """
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    rule = [["-" * width for width in widths]] if has_rule else []
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in [columns, *rule, *rows]]
