"""Tests of the benchmark of documents that are apart: their lengths, its works, and its table."""

from __future__ import annotations

import argparse
from typing import List

import numpy as np
import pytest

from tests.benchmarks.programs import BENCHMARKS  # noqa: F401 # the benchmarks find the modules beside them

from documents import MASKS, WITHOUT, attention_works, measure, starts_of, step_works, table  # noqa: E402 # isort: skip


@pytest.mark.parametrize("kind", ["fixed", "uniform", "geometric"])
def test_documents_have_the_mean_length(kind: str) -> None:
    random, lengths = np.random.RandomState(1), []  # type: ignore[var-annotated]
    for _ in range(40):
        starts = starts_of(kind, 10000, 200, random)
        assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < 10000
        lengths += np.diff(starts).tolist()
    assert np.mean(lengths) == pytest.approx(200, rel=0.05)
    assert (min(lengths), max(lengths)) == (200, 200) if kind == "fixed" else min(lengths) <= 105
    assert kind != "uniform" or (min(lengths) >= 100 and max(lengths) <= 300)


def test_a_row_is_compared_with_that_without_a_mask_turn_by_turn() -> None:
    lines: List[str] = table("attention", [{WITHOUT: 0.4, "fixed": 0.1}, {WITHOUT: 0.2, "fixed": 0.1}])
    assert lines[1].split() == ["no", "mask", "300.00", "1.000", "(1.000-1.000)"]
    assert lines[2].split() == ["fixed", "100.00", "3.000", "(2.000-4.000)"]


def test_all_works_are_measured_in_each_turn_after_the_first() -> None:
    options = argparse.Namespace(length=48, mean=7, heads=2, width=8, preset="tiny", settings=["model.seq_len=24"])
    figures = measure(attention_works(options, "float64"), 2)
    assert [set(turn) for turn in figures] == [{WITHOUT, "fixed", "uniform", "geometric"}] * 2
    works = step_works(options, "float32")
    assert set(works) == set(MASKS) and set(measure(works, 1)[0]) == set(MASKS)
