"""Names of signals, as a person knows them."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``; SIGINT is ``Ctrl-C (SIGINT)``."""
    if number == signal.SIGINT:
        return "Ctrl-C (SIGINT)"
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "no name"
