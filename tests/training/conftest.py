"""Fixtures of the training tests: models this small are trained by one thread, as more would wait for each other."""

from __future__ import annotations

import sys
from typing import Any, Iterator

import pytest


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Compute with one thread; restore the number of threads and the handling of denormals afterwards."""
    torch: Any = sys.modules.get("torch")  # not every test here needs it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)
