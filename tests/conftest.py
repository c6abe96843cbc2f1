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
        compat: Any = sys.modules["fugaku_gpt.compat"]
        narrow, compat._agreed_gelu_by_erf, compat._agreed_onednn = before
        compat._agreed.clear()
        compat._agreed.update(narrow)


def _agreed() -> Any:
    compat: Any = sys.modules.get("fugaku_gpt.compat")  # of most tests, nothing needs PyTorch
    if compat is None:
        return {}, None, None
    return dict(compat._agreed), compat._agreed_gelu_by_erf, compat._agreed_onednn
