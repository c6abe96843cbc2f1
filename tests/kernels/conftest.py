"""The kernels, compiled once for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.kernels import compile_kernels
from fugaku_gpt.kernels.build import CompiledLibrary


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, CompiledLibrary]:
    """Returns (a prefix, the library in it)."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler on PATH")
    prefix = tmp_path_factory.mktemp("prefix")
    return prefix, compile_kernels(prefix=prefix)
