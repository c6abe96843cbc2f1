"""Tests that these ranks of this build draw the golden curves, which one rank of one build drew once."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from fugaku_gpt.comm import Communicator
from tests.matrix.cases import CASES, FIXTURE, FIXTURES
from tests.matrix.checkpoints import FIXTURES_FOLDER, only_checkpoint, resume
from tests.matrix.curves import distances, draw, read_golden, too_far, trainer_for

LAYOUTS: List[Tuple[str, str]] = [(name, layout) for name, case in CASES.items() for layout in case.layouts]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=[f"{name}: {layout}" for name, layout in LAYOUTS])
def test_a_layout_draws_the_golden_curve(world: Communicator, name: str, layout: str) -> None:
    case = CASES[name]
    if case.config(layout).layout.ranks != world.size:
        pytest.skip("another number of ranks")
    curve_distances = distances(draw(trainer_for(name, layout, world=world)), read_golden(name).curve)
    if world.rank == 0:
        text = " ".join(f"{quantity} {distance:.1e}" for quantity, distance in curve_distances.items())
        print(f"\ngolden {name}, {layout}: {text}")
    assert too_far(curve_distances, case) == {}


@pytest.mark.parametrize("layout", ["dp=2 zero", "tp=2 sp", "pp=2"])
@pytest.mark.parametrize("build", FIXTURES)
def test_a_checkpoint_of_each_build_resumes_in_other_layouts(world: Communicator, build: str, layout: str) -> None:
    if world.size != 2:
        pytest.skip("two ranks")
    path = only_checkpoint(FIXTURES_FOLDER / build / FIXTURE)
    assert resume(world, path, FIXTURE, layout).problem == ""
