"""A clock that tells the time of day but never jumps: the start and the end of a run are compared by it."""

from __future__ import annotations

import time

_SINCE_EPOCH = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since the epoch, by the time of day when this process began and the span since then.

    Somebody may set the clock of a node while a run lasts; its end must not come before its start.
    """
    return _SINCE_EPOCH + time.monotonic()
