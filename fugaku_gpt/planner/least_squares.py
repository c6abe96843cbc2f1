"""Robust least squares with weak priors: few constants, few rows, some of them wrong by a factor of two.

Levenberg-Marquardt steps on residuals whose large values count less (the soft L1 loss of Triggs et al. 2000, as scipy's
``least_squares(loss="soft_l1")`` has it), in NumPy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

_STEP = 1e-5  # of the logarithm of a constant, for the derivative
_ENOUGH = 1e-9  # relative fall of the cost below which the search ends


@dataclass(frozen=True)
class Fit:
    """Values that fit best, and their covariance: how far the rows and the priors leave them free.

    Rows that miss by more than expected tell less (Huber's sandwich), those that miss by less do not tell more.
    Shapes: values [P], covariance [P, P].
    """

    values: "np.ndarray"
    covariance: "np.ndarray"
    cost: float


def fit(
    misfit: "Callable[[np.ndarray], np.ndarray]",
    prior: "np.ndarray",
    width: "np.ndarray",
    start: "np.ndarray | None" = None,
    rounds: int = 60,
    enough: float = _ENOUGH,
) -> Fit:
    """Values [P] that make ``misfit`` [N] small while they stay near ``prior`` [P].

    Args:
        misfit: from values to residuals in units of their expected size; beyond 1 they count by their amount, not its
            square.
        width: how far [same unit as the values] each may be from its prior as one standard deviation.
        start: where the search begins; the prior where it is not given.
    """

    def cost_at(values: "np.ndarray") -> float:
        residual = misfit(values)
        return float(np.sum(2 * (np.sqrt(1 + residual**2) - 1)) + np.sum(((values - prior) / width) ** 2))

    values = np.array(prior if start is None else start, dtype=float)
    cost, damping = cost_at(values), 1e-3
    normal = meat = np.diag(1 / width**2)
    for _ in range(rounds):
        residual = misfit(values)
        slopes = np.empty((len(residual), len(values)))
        for index in range(len(values)):
            moved = values.copy()
            moved[index] += _STEP
            slopes[:, index] = (misfit(moved) - residual) / _STEP
        weight = 1 / np.sqrt(1 + residual**2)
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(1 / width**2)
        meat = slopes.T @ (np.maximum(weight, (weight * residual) ** 2)[:, None] * slopes) + np.diag(1 / width**2)
        downhill = -(slopes.T @ (weight * residual) + (values - prior) / width**2)
        before = cost
        while damping < 1e9:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            candidate = values + np.clip(step, -1.0, 1.0)
            found = cost_at(candidate)
            if found <= cost:
                values, cost, damping = candidate, found, max(damping / 5, 1e-9)
                break
            damping *= 4
        if before - cost <= enough * max(cost, 1e-12):
            break
    bread = np.linalg.inv(normal)
    return Fit(values, bread @ meat @ bread, cost)
