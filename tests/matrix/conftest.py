"""Trains the small models of these tests by one thread: several would wait for each other."""

from __future__ import annotations

import sys
from typing import Any, Iterator

import pytest


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Computes with one thread, as ranks that share a machine do."""
    torch: Any = sys.modules.get("torch")  # not every test here needs it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
