"""This environment's library of kernels, for tests that cannot do without."""

from __future__ import annotations

import pytest

from fugaku_gpt.kernels import Library, LibraryError, load_library


def loaded_library() -> Library:
    """Returns the library, once PyTorch is imported, or skips the test."""
    try:
        return load_library()
    except LibraryError as error:
        pytest.skip(f"native kernels: {error}")
