"""What a check of a kept table has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowFinding:
    """One thing that cannot be right.

    Attributes:
        line: from 1.
        rule: short name of the rule, such as ``tflops``.
        what: is wrong.
        cause: the likely slip, and so the way to mend it; empty where none is likelier than others. Where the slip is
            what was found (rules ``swapped`` and ``shifted``), the signs that it left.
    """

    line: int
    rule: str
    what: str
    cause: str = ""
