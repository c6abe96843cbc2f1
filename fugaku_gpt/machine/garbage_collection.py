"""Python's garbage collector while a process starts."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector while modules are imported and a model is built.

    That leaves hardly any garbage, but each full collection traverses all objects of PyTorch (together a tenth of a
    second and more of a start). Objects that exist at the end are never traversed again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
