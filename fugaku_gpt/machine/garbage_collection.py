"""Python's garbage collector, where it only costs time."""

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
    with gc_suspended():
        yield
        gc.freeze()


@contextlib.contextmanager
def gc_suspended() -> Iterator[None]:
    """Suspends the garbage collector while many objects are made, all of which stay, and which form no cycles: it would
    traverse them again and again, for a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
