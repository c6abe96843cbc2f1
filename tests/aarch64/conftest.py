"""These tests need the emulated machine that `make test-arm` makes; without it they are not collected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aarch64.machine import FOLDER

collect_ignore_glob = [] if FOLDER is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Returns a folder of all workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent
