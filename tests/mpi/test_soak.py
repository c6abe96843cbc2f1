"""Random layouts with random delays on three, six and eight ranks: see ``soak.py``."""

from __future__ import annotations

import pytest

from fugaku_gpt.comm import Communicator
from tests.mpi.soak import delayed, layouts_of, run_layouts

LIMIT_SECONDS = 300.0  # of a layout


def test_random_layouts_with_random_delays_do_not_hang(world: Communicator) -> None:
    if world.size != 8:
        pytest.skip("eight ranks")
    run_layouts(delayed(world), layouts_of(world, 2, seed=world.size), LIMIT_SECONDS)


@pytest.mark.long
def test_more_random_layouts_with_random_delays_do_not_hang(world: Communicator) -> None:
    if world.size not in (3, 6, 8):
        pytest.skip("three, six or eight ranks")
    run_layouts(delayed(world), layouts_of(world, 5, seed=world.size), LIMIT_SECONDS)
