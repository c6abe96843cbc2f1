"""Tests of the table that shows which operators make one side slower."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from fugaku_gpt.cli.output import render_rows
from fugaku_gpt.compare.operators import COLUMNS, explanation, operator_rows, slowdown
from fugaku_gpt.records.operators import CLASSES, Operators


def job(slowdown: float = 1.25, **seconds: float) -> Operators:
    """A job with these seconds for each class, underscores for spaces; the other classes take none."""
    classes = {**dict.fromkeys(CLASSES, 0.0), **{name.replace("_", " "): value for name, value in seconds.items()}}
    total_seconds = sum(classes.values())
    return Operators(3, total_seconds, 2, classes, total_seconds / slowdown)


A = [job(matrix_product=1.0, GELU=0.5, softmax=0.2), job(matrix_product=1.2, GELU=0.5, softmax=0.2)]
B = [job(matrix_product=1.0, GELU=0.1, softmax=0.26, cast=0.04)]


def test_rows_are_means_over_jobs_and_their_shares_sum_to_1() -> None:
    rows: List[Dict[str, Any]] = operator_rows(A, B)
    assert [tuple(row[name] for name in COLUMNS) for row in rows] == [
        ("matrix product", 1.1, 1.0, 0.909, 0.25),
        ("softmax", 0.2, 0.26, 1.3, -0.15),
        ("GELU", 0.5, 0.1, 0.2, 1.0),
        ("cast", 0.0, 0.04, None, -0.1),
    ]
    assert render_rows(COLUMNS, rows, "md").splitlines()[-1] == "| cast | 0.0 | 0.04 | - | -0.1 |"


def test_the_sentence_names_the_class_that_explains_most_either_way() -> None:
    assert explanation(A, B) == (
        "GELU explains 100% of the difference between profiled iterations of B and A (1.4 s and 1.8 s): "
        "0.4 s less, 0.20 times A's; softmax goes the other way, by 0.06 s"
    )
    assert explanation(B, A) == (
        "GELU explains 100% of the difference between profiled iterations of B and A (1.8 s and 1.4 s): "
        "0.4 s more, 5.00 times A's; softmax goes the other way, by 0.06 s"
    )
    assert ": 0.5 s more" in explanation([job(softmax=1.0)], [job(softmax=1.0, cast=0.5)])  # A has no casts


def test_a_share_of_nothing_has_no_sign() -> None:
    rows = operator_rows([job(matrix_product=2.0, cast=1e-6)], [job(matrix_product=1.0, cast=2e-6)])
    assert [str(row["share of the difference"]) for row in rows] == ["1.0", "0.0"]


def test_equal_sides_are_not_explained() -> None:
    almost = [job(matrix_product=1.009, GELU=0.5)]
    base = [job(matrix_product=1.0, GELU=0.5)]
    assert {row["share of the difference"] for row in operator_rows(base, almost)} == {None}
    assert explanation(base, almost).endswith("differ by less than 1% (1.509 s and 1.5 s): nothing to explain")


def test_a_side_without_jobs_is_refused() -> None:
    for sides in ((A, []), ([], B)):
        for function in (operator_rows, explanation):
            with pytest.raises(ValueError, match="at least one job"):
                function(*sides)  # type: ignore[operator]


def test_the_profiler_s_cost_is_a_geometric_mean() -> None:
    assert slowdown([job(1.0, GELU=1.0), job(4.0, GELU=1.0)]) == pytest.approx(2.0)
