"""Tests of the fit of a model's values to rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fugaku_gpt.planner.least_squares import fit_least_squares

POINTS = np.array([0.0, 1.0, 2.0, 3.0])


def test_a_line_without_noise_is_fitted_exactly() -> None:
    fit = fit_least_squares(lambda v: 1e4 * (v[0] + v[1] * POINTS - (2 + 3 * POINTS)), np.zeros(2), np.full(2, 1e3))
    assert fit.values == pytest.approx([2, 3], rel=1e-4)
    assert fit.cost == pytest.approx((2 / 1e3) ** 2 + (3 / 1e3) ** 2, rel=1e-2)


def test_the_cost_counts_large_residuals_by_their_amount() -> None:
    """2 (sqrt(1 + r^2) - 1) each, and nothing for values that are as expected before."""
    fit = fit_least_squares(lambda v: np.array([3.0, 0.0, -3.0]), np.array([5.0]), np.array([1.0]))
    assert fit.cost == pytest.approx(2 * 2 * (math.sqrt(10) - 1), rel=1e-12)
    assert fit.values == pytest.approx([5.0]) and fit.covariance == pytest.approx(np.array([[1.0]]))


def test_a_single_outlier_hardly_moves_a_constant() -> None:
    rows = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1000.0])
    fit = fit_least_squares(lambda v: (v[0] - rows) / 0.01, np.zeros(1), np.full(1, 1e3))
    assert fit.values[0] == pytest.approx(1.0, abs=0.01)


def test_values_without_rows_stay_as_expected_before() -> None:
    fit = fit_least_squares(lambda v: 10 * (v[:1] - 1.0), np.array([0.0, 7.0]), np.array([100.0, 0.5]))
    assert fit.values == pytest.approx([1.0, 7.0], abs=1e-3)
    assert fit.covariance[1, 1] == pytest.approx(0.25, rel=1e-6)
    assert fit.covariance[0, 0] == pytest.approx(1 / (100 + 1e-4), rel=1e-3)
