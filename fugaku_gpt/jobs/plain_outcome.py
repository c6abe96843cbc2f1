"""How a job ended that trains no run of ours: by the scheduler's codes and the job's output alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, List

from fugaku_gpt.jobs.failure_causes import NEVER, Cause, scheduler_cause
from fugaku_gpt.launch.launch_result import failure_reason
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.job import LOST, JobStatus

_LOGS = "look at `fugaku-gpt job logs`"
_AGAIN = "remove the cause, and submit it again"


def plain_cause(scheduler: str, status: JobStatus, tail: Callable[[], List[str]]) -> Cause:
    """Return the cause of a job's end; it is over by ``status``. Exit code 0 is success: the script says no more.

    Args:
        scheduler: name of its scheduler.
        tail: returns the last lines of its output.
    """
    if status.state == LOST:
        return Cause(runs.LOST, status.reason or "the scheduler no longer knows the job", _LOGS, NEVER)
    reported = scheduler_cause(scheduler, status)
    if reported is not None:
        return replace(reported, advice=_AGAIN, retry=NEVER)
    if status.exit_code == 0 and not status.signal:
        return Cause(runs.OK, "", "", NEVER)
    if status.exit_code is None and not status.signal:
        return Cause(runs.FAILED, f"{status.raw or status.state}, and no exit code says how", _LOGS, NEVER)
    summary = f"signal {status.signal}" if status.signal else f"exit code {status.exit_code}"
    reason = failure_reason(tail())
    return Cause(runs.FAILED, f"{summary}: {reason}" if reason else summary, _LOGS, NEVER)
