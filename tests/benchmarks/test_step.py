"""Tests of the floor over several turns: each product is computed by the same way in all turns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from step import products_by_best_way, settle  # noqa: E402
from turns import Unit  # noqa: E402


def _value(**ways: float) -> Dict[str, Any]:
    """A turn of a floor with a product of 6 FLOP, twice in a step."""
    best = min(ways, key=lambda way: ways[way])
    return {"products": {"qkv forward": [2, ways[best], 6.0 / ways[best], best]}, "ways": {"qkv forward": ways}}


TURNS = [_value(nn=3.0, nt=4.0), _value(nn=5.0, nt=4.0), _value(nn=3.0, nt=2.0)]


def test_a_product_is_computed_the_same_way_in_all_turns_by_the_smallest_median() -> None:
    products = [turn["qkv forward"] for turn in products_by_best_way(TURNS)]
    assert products == [[2, 3.0, 2.0, "nn"], [2, 5.0, 1.2, "nn"], [2, 3.0, 2.0, "nn"]]  # nn: 3, nt: 4


def test_a_settled_floor_is_the_sum_of_the_products_and_other_contestants_stay_unchanged() -> None:
    ours = Unit(9.0, 1.5, [1])
    turns = [{"floor-bf16": Unit(value["products"]["qkv forward"][1] * 2, value, [1]), "ours": ours} for value in TURNS]
    before = [turn["floor-bf16"].seconds for turn in turns]
    settled = settle(turns)
    assert [turn["floor-bf16"].seconds for turn in settled] == pytest.approx([6.0, 10.0, 6.0])
    assert [turn["floor-bf16"].seconds for turn in turns] == before == [6.0, 8.0, 4.0]
    assert all(turn["ours"] == ours for turn in settled)
