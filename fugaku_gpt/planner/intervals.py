"""80 % intervals of predicted figures: what a model's constants leave open, what left-out rows have missed by, and how
far outside of the fitted rows a configuration is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping

import numpy as np

from fugaku_gpt.machine.constants import Fitted

NORMAL_80 = 1.2816  # half of an 80 % interval of a normal distribution, in standard deviations
WHOLE = "whole"
_STEP = 1e-4  # of the logarithm of a constant, for the derivative
_UNTOLD = 0.1  # for each factor of e, where no row can tell
_NOTHING = 1e-9  # seconds: what is left of differences


@dataclass(frozen=True)
class Guess:
    """A figure with its 80 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, width: float) -> "Guess":
        """Of a value and the standard deviation of its logarithm."""
        reach = float(np.exp(NORMAL_80 * width))
        return cls(value, value / reach, value * reach)


def total_width(constants: Any, spread: float, beyond_spread: float, distance: Any) -> Any:
    """Standard deviation of a prediction's logarithm: sqrt(constants² + spread² + (beyond_spread * distance)²).

    Args:
        constants: what the widths of the model's constants leave open; a number or an array.
        spread: of rows left out of the fit, besides that.
        beyond_spread: of rows outside of the hull of the fitted ones, besides that, for each factor of e.
        distance: outside of that hull, in logarithms; see :mod:`fugaku_gpt.planner.extrapolation`.
    """
    return np.sqrt(constants**2 + spread**2 + (beyond_spread * distance) ** 2)


def widths(
    parts_of: "Callable[[Mapping[str, float]], Mapping[str, np.ndarray]]",
    fitted: Fitted,
    distance: Any = 0.0,
    by_rule: Any = 0.0,
) -> "Dict[str, np.ndarray]":
    """Standard deviations [N] of the logarithm of each part, and of their sum as :data:`WHOLE`.

    Args:
        parts_of: seconds [N] of each part with these values of the model's constants.
        distance: outside of the hull of the fitted rows; a number or [N].
        by_rule: the same of inputs that no row of any machine has, so that none has told what they add.
    """

    def with_whole(values: Mapping[str, float]) -> "Dict[str, np.ndarray]":
        parts = {name: np.asarray(part, dtype=float) for name, part in parts_of(values).items()}
        return {**parts, WHOLE: np.sum(list(parts.values()), axis=0)}

    free = fitted.free
    covariance = np.array(fitted.covariance) if fitted.covariance else np.diag([one.width**2 for one in free])
    here = with_whole(fitted.values)
    slopes: "Dict[str, List[np.ndarray]]" = {name: [] for name in here}
    for constant in free:
        moved = with_whole({**fitted.values, constant.name: constant.value * np.exp(_STEP)})
        for name, lines in slopes.items():
            lines.append((moved[name] - here[name]) / _STEP)
    found = {}
    for name, lines in slopes.items():
        slope = np.array(lines)
        deviation = np.sqrt(np.maximum(0.0, np.sum(slope * np.tensordot(covariance, slope, axes=1), axis=0)))
        something = here[name] > _NOTHING
        share = np.where(something, deviation / np.where(something, here[name], 1.0), 0.0)
        known = total_width(share, fitted.interval_spread, fitted.beyond_spread, distance)
        found[name] = np.hypot(known, _UNTOLD * by_rule)
    return found
