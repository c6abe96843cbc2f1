"""Numbers on the command line: read only where they are finite, and printed with few digits."""

from __future__ import annotations

import math
from typing import Any, Optional

import click


class FiniteRange(click.FloatRange):
    """As click's, which takes nan for a number in any range."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        """As a finite number in the range."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def short(number: float, digits: int = 4) -> float:
    """Rounded to so many significant digits."""
    return float(f"{number:.{digits}g}")
