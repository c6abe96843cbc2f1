"""A simulated PJM for tests: ``from tests.support.simulated import simulated_pjm  # noqa: F401`` makes it a fixture."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Iterator, Optional

import pytest

from fugaku_gpt.simulator.session import Simulator
from fugaku_gpt.simulator.settings import Settings

# short limits and little patience, so that tests are quick
QUICK = {"min_elapse": 1.0, "grace": 1.0, "slots": 4}


@contextlib.contextmanager
def simulated(directory: Optional[Path] = None, **settings: Any) -> Iterator[Simulator]:
    """A simulator with quick settings, which ``settings`` override."""
    with Simulator(directory, Settings(**{**QUICK, **settings})) as site:
        yield site


@pytest.fixture
def simulated_pjm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """A simulator whose commands are on this process's PATH."""
    with simulated(tmp_path / "sim") as site:
        monkeypatch.setenv("PATH", site.environment["PATH"])
        yield site
