"""Numbers on the command line: read only where they are finite, and printed with few digits."""

from __future__ import annotations

import math
from typing import Any, Optional

import click

from fugaku_gpt.config.values import BadValue, parse_duration


class FiniteRange(click.FloatRange):
    """A range of numbers like click's, which accepts nan in any range; this one does not."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        """Convert a value to a finite number in the range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def seconds_of_option(_ctx: click.Context, _param: click.Parameter, value: Optional[str]) -> Optional[float]:
    """Convert a duration on the command line to seconds; for the ``callback`` of an option."""
    if value is None:
        return None
    try:
        seconds = parse_duration(value)
    except BadValue as error:
        raise click.BadParameter(f"{value!r}: {error}") from None
    if seconds <= 0:
        raise click.BadParameter(f"{value!r}: must be above 0")
    return seconds


def round_significant(number: float, digits: int = 4) -> float:
    """Round a number to some significant digits."""
    return float(f"{number:.{digits}g}")
