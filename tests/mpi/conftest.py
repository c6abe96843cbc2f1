"""Tests here run on every rank of an ``mpirun``; outside one there is nothing to collect."""

from __future__ import annotations

import os

import pytest

from fugaku_gpt.comm import Communicator, open_world

RANKS_VARIABLE = "FUGAKU_GPT_TEST_RANKS"

if RANKS_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def world() -> Communicator:
    """All ranks of this test run."""
    return open_world()
