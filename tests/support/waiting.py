"""Waiting for what another process does. A deadline only ends a test that would hang: no test is about a time."""

from __future__ import annotations

import subprocess
import time
from typing import Callable, List, Optional, TypeVar

from fugaku_gpt.jobs.schedulers.protocol import Scheduler
from fugaku_gpt.records.job import JobStatus

HANG_SECONDS = 1200.0  # far beyond what a busy machine needs
T = TypeVar("T")


def until(
    condition: Callable[[], T],
    failure: Callable[[], object] = lambda: "it did not come true",
    pause: float = 0.02,
    process: "Optional[subprocess.Popen[bytes]]" = None,
) -> T:
    """Wait until a condition holds, and return its value.

    Args:
        failure: says after the deadline what was there instead.
        pause: seconds between two looks.
        process: the one that brings the condition about: its end before that is a failure.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        has_ended = process is not None and process.poll() is not None
        value = condition()
        if value:
            return value
        assert not has_ended and time.monotonic() < deadline, failure()
        time.sleep(pause)


def until_state(scheduler: Scheduler, job_id: str, *states: str) -> JobStatus:
    """Wait until a job is in one of these states, and return its status."""
    seen: List[JobStatus] = []

    def is_there() -> bool:
        seen[:] = [scheduler.poll([job_id])[job_id]]
        return seen[0].state in states

    until(is_there, lambda: f"{job_id} is {seen[0]}, not {states}", pause=0.05)
    return seen[0]
