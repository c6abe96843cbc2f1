"""Robust least squares with weak priors: few constants, few rows, some of them wrong by a factor of two.

Levenberg-Marquardt steps on residuals whose large values count less (the soft L1 loss of Triggs et al. 2000, as scipy's
``least_squares(loss="soft_l1")`` has it), in NumPy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

_STEP = 1e-5  # of the logarithm of a constant, for the derivative
_TOLERANCE = 1e-9  # relative fall of the cost below which the search ends


@dataclass(frozen=True)
class Fit:
    """Values that fit best, and their covariance, which says how far the rows and the priors determine them.

    Rows that miss by more than expected carry less information (Huber's sandwich estimator); those that miss by less do
    not carry more.
    Shapes: values [P], covariance [P, P].
    """

    values: "np.ndarray"
    covariance: "np.ndarray"
    cost: float


def fit_least_squares(
    misfit: "Callable[[np.ndarray], np.ndarray]",
    prior: "np.ndarray",
    width: "np.ndarray",
    start: "np.ndarray | None" = None,
    max_rounds: int = 60,
    tolerance: float = _TOLERANCE,
) -> Fit:
    """Values [P] that make ``misfit`` [N] small while they stay close to ``prior`` [P].

    Args:
        misfit: maps values to residuals in units of their expected size; a residual beyond 1 counts by its amount, not
            by its square.
        width: standard deviation of each value around its prior, in the unit of the values.
        start: values to begin with; default: the prior.
        max_rounds: largest number of steps.
        tolerance: relative decrease of the cost below which the search ends.
    """

    def cost_at(values: "np.ndarray") -> float:
        residual = misfit(values)
        return float(np.sum(2 * (np.sqrt(1 + residual**2) - 1)) + np.sum(((values - prior) / width) ** 2))

    values = np.array(prior if start is None else start, dtype=float)
    cost, damping = cost_at(values), 1e-3
    normal = meat = np.diag(1 / width**2)
    for _ in range(max_rounds):
        residual = misfit(values)
        slopes = np.empty((len(residual), len(values)))
        for index in range(len(values)):
            shifted = values.copy()
            shifted[index] += _STEP
            slopes[:, index] = (misfit(shifted) - residual) / _STEP
        weight = 1 / np.sqrt(1 + residual**2)
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(1 / width**2)
        meat = slopes.T @ (np.maximum(weight, (weight * residual) ** 2)[:, None] * slopes) + np.diag(1 / width**2)
        downhill = -(slopes.T @ (weight * residual) + (values - prior) / width**2)
        before = cost
        while damping < 1e9:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            candidate = values + np.clip(step, -1.0, 1.0)
            candidate_cost = cost_at(candidate)
            if candidate_cost <= cost:
                values, cost, damping = candidate, candidate_cost, max(damping / 5, 1e-9)
                break
            damping *= 4
        if before - cost <= tolerance * max(cost, 1e-12):
            break
    bread = np.linalg.inv(normal)
    return Fit(values, bread @ meat @ bread, cost)
