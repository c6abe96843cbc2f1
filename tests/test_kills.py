"""Tests that a run that is killed repeatedly ends with the metrics of a run that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import survives

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_kills_cost_nothing_but_time(kills: int, tmp_path: Path) -> None:
    print(survives(tmp_path, kills, seed=3))  # a hundred: `make soak`
