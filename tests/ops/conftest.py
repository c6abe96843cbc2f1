"""Fixtures of the tests of operators."""

from __future__ import annotations

from typing import Any, Iterator

import pytest
import torch


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: Any) -> Iterator[int]:
    """Lets a test run with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
