"""Signals at which ranks were stopped: the program that waited for them gets them as well."""

from __future__ import annotations

import signal
from typing import Any, Optional

from fugaku_gpt.launch.launcher import launch
from fugaku_gpt.launch.processes import Outcome

# SIGUSR1 asks a run alone to stop, with a checkpoint, and not the program
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pass_on_signal(stopped_by: Optional[int]) -> None:
    """Raise the signal for which ranks were ended once more, for this program's own handler, or the signal's default:
    KeyboardInterrupt at Ctrl-C, and the end of the process at SIGTERM and SIGHUP. Nothing is done for None and for
    SIGUSR1. Returns where the program's handler does."""
    if stopped_by in _PASSED_ON:
        signal.raise_signal(stopped_by)


class WatchedLaunch:
    """Starts the ranks of runs, and keeps the first signal for which some of them, or what starts them, were ended.

    Attributes:
        stopped_by: the signal, or None.
    """

    def __init__(self) -> None:
        self.stopped_by: Optional[int] = None

    def __call__(self, *arguments: Any, **options: Any) -> Outcome:
        """See :func:`fugaku_gpt.launch.launcher.launch`."""
        outcome = launch(*arguments, **options)
        if outcome.stopped_by is not None:
            self.note(outcome.stopped_by)
        return outcome

    def note(self, number: int) -> None:
        """Keep a signal, if it is the first."""
        if self.stopped_by is None:
            self.stopped_by = number
