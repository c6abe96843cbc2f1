"""What every test starts from."""

from __future__ import annotations

import signal
import sys
from typing import Any, Iterator

import pytest
from hypothesis import HealthCheck, settings

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: tests that send it need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about who else uses the machine, and nothing about the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def kernels_as_they_were() -> Iterator[None]:
    """What a run in this process has agreed on (``compat``) is not agreed on for the tests after it."""
    before = _agreed()
    yield
    if before != _agreed():
        agreed: Any = sys.modules["fugaku_gpt.compat.kernel_choices"]
        vars(agreed.AGREED).update(before)


def _agreed() -> Any:
    agreed: Any = sys.modules.get("fugaku_gpt.compat.kernel_choices")  # of most tests, nothing needs PyTorch
    if agreed is None:
        names = ("gelu_by_erf", "products_by_onednn", "compiled", "compiled_products")
        return {"in_float32": {}, **dict.fromkeys(names)}
    return {**vars(agreed.AGREED), "in_float32": dict(agreed.AGREED.in_float32)}
