"""Tests that one rank of this build draws the golden curves, and that small mistakes are detected."""

from __future__ import annotations

from typing import List, Tuple

import pytest
import torch

from fugaku_gpt import compat
from tests.matrix.cases import CASES
from tests.matrix.curves import (
    distances,
    draw,
    golden_text,
    names,
    part,
    read_golden,
    settings_of,
    too_far,
    trainer_for,
    trainer_of,
)
from tests.matrix.mutations import MUTATIONS, NONE, Mutation

MISTAKES: List[Tuple[str, str, Mutation]] = [
    (name, mistake, mutation) for name, mutations in MUTATIONS.items() for mistake, mutation in mutations.items()
]
ENOUGH = 5  # iterations in which a mistake must be detected
FEWER_MICRO_BATCHES = "micro=4"  # two for each iteration; the curve is the same, and is drawn in a third of the time
CLEAR = 3.0  # times the tolerance


@pytest.mark.parametrize("name", CASES)
def test_a_single_rank_draws_the_golden_curve(name: str) -> None:
    golden = read_golden(name)
    assert golden.settings == settings_of(CASES[name].config()), "write it anew: python -m tests.matrix.golden --write"
    from_golden = distances(draw(trainer_for(name)), golden.curve)
    assert too_far(from_golden, CASES[name]) == {}


def test_products_in_float16_draw_the_same_curve_however_slow_they_are() -> None:
    name = "float16-products"
    compat.choose_float32_operations(compat.operations_without_kernel(torch.float16), torch.float16)
    from_golden = distances(draw(trainer_of(CASES[name].config())), read_golden(name).curve)
    assert too_far(from_golden, CASES[name]) == {}


def test_every_file_belongs_to_a_case_and_equals_the_program_s_output() -> None:
    assert set(names()) == set(CASES)
    for name in CASES:
        golden = read_golden(name)
        text = golden_text(name, golden.curve, golden.made_by)
        assert text == golden.text, f"{name}: write it anew: python -m tests.matrix.golden --write {name}"
        losses = golden.curve.losses
        assert len(losses) == CASES[name].config().training.iterations and losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize(("name", "mistake", "mutation"), MISTAKES, ids=[f"{n}: {w}" for n, w, _ in MISTAKES])
def test_a_mistake_is_far_from_the_golden_curve(
    name: str, mistake: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden_curve, settings = part(read_golden(name).curve, 0, ENOUGH), mutation
    if callable(settings):
        settings(monkeypatch)
        settings = ()
    from_golden = distances(draw(trainer_for(name, FEWER_MICRO_BATCHES, *settings), ENOUGH), golden_curve)
    multiples = {quantity: distance / CASES[name].tolerance[quantity] for quantity, distance in from_golden.items()}
    print(f"mistake {name}, {mistake}: {multiples}")
    assert max(multiples.values()) > CLEAR


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_the_optimizer_of_the_mistakes_is_right_without_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(NONE)
    NONE(monkeypatch)
    from_golden = distances(draw(trainer_for(name)), read_golden(name).curve)
    assert too_far(from_golden, CASES[name]) == {}


@pytest.mark.parametrize("name", MUTATIONS)
def test_fewer_micro_batches_without_a_mistake_draw_the_golden_curve(name: str) -> None:
    """Else every mistake below would be detected, whatever it changes."""
    from_golden = distances(
        draw(trainer_for(name, FEWER_MICRO_BATCHES), ENOUGH), part(read_golden(name).curve, 0, ENOUGH)
    )
    assert too_far(from_golden, CASES[name]) == {}
