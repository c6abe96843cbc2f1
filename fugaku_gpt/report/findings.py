"""The findings of a check of hand-written tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowFinding:
    """One thing in a row that cannot be right.

    Attributes:
        line: line number, from 1.
        rule: short name of the rule, such as ``tflops``.
        what: description of the problem.
        cause: the likely slip, and so the way to mend it; empty if none is likelier than others. If the finding is the
            slip itself (rules ``swapped`` and ``shifted``), the signs that it left.
    """

    line: int
    rule: str
    what: str
    cause: str = ""
