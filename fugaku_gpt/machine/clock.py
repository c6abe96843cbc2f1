"""A clock that tells the time of day but never jumps: the start and the end of a run are compared by it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Dict

from fugaku_gpt.machine.system import this_system

_VARIABLE = "FUGAKU_GPT_CLOCK"


def steady_time() -> float:
    """Return the seconds since the epoch, by the time of day when this process began and the span since then.

    Somebody may set the clock of a node while a run lasts; its end must not come before its start. Processes of one
    node that got :func:`clock_variables` have the same clock.
    """
    return _SINCE_EPOCH + time.monotonic()


def clock_variables() -> Dict[str, str]:
    """Return the variable that gives a child process on this node the clock of this one."""
    return {_VARIABLE: f"{_boot()} {_SINCE_EPOCH!r}"}


def _boot() -> str:
    """The identity of this node's present start, within which the monotonic clock counts."""
    return this_system().read("proc/sys/kernel/random/boot_id") or ""


def _since_epoch() -> float:
    """Seconds from the epoch to the zero of the monotonic clock: as the parent has it, if it runs on this node."""
    boot, _, text = os.environ.get(_VARIABLE, "").partition(" ")
    if boot and boot == _boot():
        with contextlib.suppress(ValueError):
            return float(text)
    return time.time() - time.monotonic()


_SINCE_EPOCH = _since_epoch()
