"""Python's garbage collector while a process starts."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """While modules are imported and a model is built: that leaves hardly any garbage, but each full collection goes
    through all objects of PyTorch (a tenth of a second and more of a start, in all). What is there at the end is never
    gone through again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
