"""Random layouts with random delays on eight ranks: see ``soak.py``. On other numbers of ranks ``tests/test_mpi.py``
starts that program; here ranks are running already."""

from __future__ import annotations

import pytest

from fugaku_gpt.comm import Communicator
from tests.mpi.soak import delayed, layouts_of, run_layouts

LIMIT_SECONDS = 300.0  # of a layout


def test_random_layouts_with_random_delays_do_not_hang(world: Communicator) -> None:
    if world.size != 8:
        pytest.skip("eight ranks")
    run_layouts(delayed(world), layouts_of(world, 5, seed=8), LIMIT_SECONDS)
