"""One rank of this build against the golden curves; and that small mistakes do not pass there."""

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
    (name, words, mutation) for name, found in MUTATIONS.items() for words, mutation in found.items()
]
ENOUGH = 5  # iterations for a mistake to be found in
CLEAR = 3.0  # times the tolerance


@pytest.mark.parametrize("name", CASES)
def test_one_rank_draws_the_golden_curve(name: str) -> None:
    kept = read_golden(name)
    assert kept.settings == settings_of(CASES[name].config()), "write it anew: python -m tests.matrix.golden --write"
    found = distances(draw(trainer_for(name)), kept.curve)
    assert too_far(found, CASES[name]) == {}


def test_products_in_float16_draw_the_same_curve_however_slow_they_are_here() -> None:
    name = "float16-products"
    compat.choose_float32_operations(compat.operations_without_kernel(torch.float16), torch.float16)
    found = distances(draw(trainer_of(CASES[name].config())), read_golden(name).curve)
    assert too_far(found, CASES[name]) == {}


def test_every_file_is_a_case_and_is_what_the_program_writes() -> None:
    assert set(names()) == set(CASES)
    for name in CASES:
        kept = read_golden(name)
        text = golden_text(name, kept.curve, kept.made_by)
        assert text == kept.text, f"{name}: write it anew: python -m tests.matrix.golden --write {name}"
        losses = kept.curve.losses
        assert len(losses) == CASES[name].config().training.iterations and losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize(("name", "words", "mutation"), MISTAKES, ids=[f"{n}: {w}" for n, w, _ in MISTAKES])
def test_a_mistake_is_far_from_the_golden_curve(
    name: str, words: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, settings = part(read_golden(name).curve, 0, ENOUGH), mutation
    if callable(settings):
        settings(monkeypatch)
        settings = ()
    found = distances(draw(trainer_for(name, "", *settings), ENOUGH), kept)
    times = {what: distance / CASES[name].tolerance[what] for what, distance in found.items()}
    print(f"mistake {name}, {words}: {times}")
    assert max(times.values()) > CLEAR


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_the_optimiser_of_the_mistakes_is_right_without_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(NONE)
    NONE(monkeypatch)
    found = distances(draw(trainer_for(name)), read_golden(name).curve)
    assert too_far(found, CASES[name]) == {}
