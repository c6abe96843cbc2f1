"""Room for the frames of Python's calls."""

from __future__ import annotations

from typing import Callable, TypeVar

T = TypeVar("T")

_SLOTS = 2**15  # of 8 bytes


def with_room_for_frames(function: Callable[[], T]) -> T:
    """Call a function below which calls do not run out of room for their frames.

    Python (from 3.11 on) keeps frames in chunks of 16 KiB: a call that does not fit into the last one maps another, and
    unmaps it when it returns. A loop that begins near the end of a chunk does so for every call; which loop that is
    depends on how deep it is called from (seen: 20,000 page faults and 0.13 s of PyTorch's import, with ``python -m``
    and not without). A frame that says that it needs more has a chunk of its own, of the next power of two, the rest of
    which is for the calls below it (CPython, ``Python/pystate.c``: ``push_chunk``): here some 250 KiB. Memory that
    nobody uses is never touched.
    """
    return _call(function)


def _call(function: Callable[[], T]) -> T:
    return function()


_call.__code__ = _call.__code__.replace(co_stacksize=_SLOTS)
