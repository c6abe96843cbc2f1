"""Names of signals, as a person knows them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

SHARED_MEMORY = "dev/shm"  # below the root: where MPI keeps the memory that ranks of a node share
_LITTLE_SHARED_MEMORY = 32 * 2**20  # bytes that an MPI may want in one piece


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``; SIGINT is ``Ctrl-C (SIGINT)``."""
    if number == signal.SIGINT:
        return "Ctrl-C (SIGINT)"
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "no name"


def bus_error_cause(directory: Path) -> str:
    """Return what has probably ended a process of this node by SIGBUS just now, and how to mend it.

    The kernel sends it to a process that writes to a mapped file for which its file system has no space left, or reads
    past the end of one: most often that of MPI in ``/dev/shm``, which containers make small.

    Args:
        directory: the file system of shared memory, usually ``/dev/shm``.
    """
    try:
        status = os.statvfs(directory)
    except OSError:
        return f"there is no {directory}, through which ranks of a node exchange messages: mount it"
    free, size = (blocks * status.f_frsize for blocks in (status.f_bavail, status.f_blocks))
    if free >= _LITTLE_SHARED_MEMORY:
        return "a file that was mapped into memory is shorter than it was, or its disk is full: see df and the corpora"
    return (
        f"{directory}, through which ranks of a node exchange messages, is full: {free / 2**20:.0f} of "
        f"{size / 2**20:.0f} MiB are free; enlarge it, as by docker run --shm-size=1g, or by mount -o remount,size=1g"
    )
