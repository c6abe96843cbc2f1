"""80 % intervals of predicted figures, from the uncertainty of a model's constants, the errors on left-out rows, and
the distance of a configuration from the fitted rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping

import numpy as np

from fugaku_gpt.machine.constants import FittedModel

NORMAL_80 = 1.2816  # half of an 80 % interval of a normal distribution, in standard deviations
TOTAL = "whole"
_STEP = 1e-4  # of the logarithm of a constant, for the derivative
_RULE_WIDTH = 0.1  # for each factor of e, where no row was measured
_NEGLIGIBLE = 1e-9  # seconds: rounding errors of differences


@dataclass(frozen=True)
class Estimate:
    """A figure with its 80 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_log_width(cls, value: float, width: float) -> "Estimate":
        """The estimate of a value whose logarithm has this standard deviation."""
        factor = float(np.exp(NORMAL_80 * width))
        return cls(value, value / factor, value * factor)


def total_width(constants: Any, spread: float, beyond_spread: float, distance: Any) -> Any:
    """Standard deviation of a prediction's logarithm: sqrt(constants² + spread² + (beyond_spread * distance)²).

    Args:
        constants: the part due to the widths of the model's constants; a number or an array.
        spread: additional spread of rows that were left out of the fit.
        beyond_spread: additional spread of rows outside of the fitted ranges, for each factor of e.
        distance: distance from the fitted ranges, in logarithms; see :mod:`fugaku_gpt.planner.extrapolation`.
    """
    return np.sqrt(constants**2 + spread**2 + (beyond_spread * distance) ** 2)


def log_widths(
    component_seconds: "Callable[[Mapping[str, float]], Mapping[str, np.ndarray]]",
    fitted: FittedModel,
    distance: Any = 0.0,
    rule_distance: Any = 0.0,
) -> "Dict[str, np.ndarray]":
    """Standard deviations [N] of the logarithm of each component, and of their sum as :data:`TOTAL`.

    Args:
        component_seconds: seconds [N] of each component for given values of the model's constants.
        distance: distance from the fitted ranges; a number or [N].
        rule_distance: the same for inputs that no row of any machine has, so that their effect was never measured.
    """

    def with_total(values: Mapping[str, float]) -> "Dict[str, np.ndarray]":
        components = {name: np.asarray(seconds, dtype=float) for name, seconds in component_seconds(values).items()}
        return {**components, TOTAL: np.sum(list(components.values()), axis=0)}

    free_constants = fitted.free_constants
    covariance = (
        np.array(fitted.covariance)
        if fitted.covariance
        else np.diag([constant.width**2 for constant in free_constants])
    )
    unchanged = with_total(fitted.values)
    slopes: "Dict[str, List[np.ndarray]]" = {name: [] for name in unchanged}
    for constant in free_constants:
        shifted = with_total({**fitted.values, constant.name: constant.value * np.exp(_STEP)})
        for name, derivatives in slopes.items():
            derivatives.append((shifted[name] - unchanged[name]) / _STEP)
    widths_by_name = {}
    for name, derivatives in slopes.items():
        slope = np.array(derivatives)
        deviation = np.sqrt(np.maximum(0.0, np.sum(slope * np.tensordot(covariance, slope, axes=1), axis=0)))
        is_nonzero = unchanged[name] > _NEGLIGIBLE
        share = np.where(is_nonzero, deviation / np.where(is_nonzero, unchanged[name], 1.0), 0.0)
        measured_width = total_width(share, fitted.interval_spread, fitted.beyond_spread, distance)
        widths_by_name[name] = np.hypot(measured_width, _RULE_WIDTH * rule_distance)
    return widths_by_name
