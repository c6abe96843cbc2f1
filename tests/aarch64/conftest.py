"""These tests need the emulated machine that `make test-arm` makes; without it they are not collected."""

from __future__ import annotations

from tests.aarch64.machine import FOLDER

collect_ignore_glob = [] if FOLDER is not None else ["test_*.py"]
