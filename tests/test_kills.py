"""Tests that a run that is killed repeatedly ends with the metrics of a run that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import survives

pytestmark = pytest.mark.mpi


def test_three_kills_cost_nothing_but_time(tmp_path: Path) -> None:
    print(survives(tmp_path, kills=3, seed=3))  # a hundred: `make soak`
