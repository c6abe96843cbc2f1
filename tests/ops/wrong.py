"""Operators that a PyTorch may have, and that no kernel may be made of."""

from __future__ import annotations

from typing import Any


def refuses(*_: Any, **__: Any) -> Any:
    """Is not there for 16 bits."""
    raise RuntimeError("not implemented for 'BFloat16'")
