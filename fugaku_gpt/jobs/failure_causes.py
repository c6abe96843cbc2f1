"""The causes of a run's end that schedulers' states and codes stand for, with status and advice."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Dict, Optional

from fugaku_gpt.pjm.codes import NEVER, RESUME, RETRY, WAIT, ending_of
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.job import CANCELLED, REJECTED, JobStatus

__all__ = [
    "CANCELLED_BY_USER",
    "MORE_MEMORY",
    "NEVER",
    "RESUME",
    "RETRY",
    "WAIT",
    "CAUSES_BY_STATE",
    "Cause",
    "scheduler_cause",
]

MORE_MEMORY = (
    "less memory per node: more layout.tp or layout.pp, a smaller training.micro_batch, fewer ranks per node, or more "
    "nodes"
)


@dataclass(frozen=True)
class Cause:
    """The cause of a job's end.

    Attributes:
        status: status of the run, one of ``records.run.STATUSES``.
        cause: one line; empty for a job that succeeded.
        advice: what to do about it.
        retry: ``resume``, ``retry``, ``never`` or ``wait``.
    """

    status: str
    cause: str
    advice: str
    retry: str


CAUSES_BY_STATE: Dict[str, Cause] = {
    "TIMEOUT": Cause(runs.TIMEOUT, "time limit reached", "resume it, or raise job.elapse", RESUME),
    "DEADLINE": Cause(runs.TIMEOUT, "deadline reached", "resume it", RESUME),
    "OUT_OF_MEMORY": Cause(runs.OUT_OF_MEMORY, "killed for memory", MORE_MEMORY, NEVER),
    "NODE_FAIL": Cause(runs.FAILED, "node down", "submit it again", RETRY),
    "BOOT_FAIL": Cause(runs.FAILED, "a node did not start", "submit it again", RETRY),
    "LAUNCH_FAILED": Cause(runs.FAILED, "it could not be started", "submit it again", RETRY),
    "PREEMPTED": Cause(runs.INTERRUPTED, "stopped for another job", "resume it", RESUME),
    "REVOKED": Cause(runs.INTERRUPTED, "moved to another cluster", "look at that cluster", NEVER),
    "STOPPED": Cause(runs.INTERRUPTED, "the queue of this machine was stopped", "resume it", RESUME),
}
PJM_STATUSES = {
    1: runs.INTERRUPTED,
    2: runs.REFUSED,
    3: runs.REFUSED,
    6: runs.INTERRUPTED,
    7: runs.INTERRUPTED,
    8: runs.REFUSED,
    9: runs.INTERRUPTED,
    11: runs.TIMEOUT,
    12: runs.OUT_OF_MEMORY,
    18: runs.INTERRUPTED,
    23: runs.OUT_OF_MEMORY,
}
CANCELLED_BY_USER = Cause(runs.INTERRUPTED, "cancelled", "resume it if this was not intended", RESUME)


def scheduler_cause(scheduler: str, status: JobStatus) -> Optional[Cause]:
    """Return the cause that the scheduler's code or state names; None if it only says that the job has ended."""
    if scheduler == "pjm":
        ending = ending_of(status.code, status.reason)
        if ending is not None and ending.code == 1:
            return CANCELLED_BY_USER
        if ending is not None and ending.code not in (0, 4, 14):
            description = f"{ending.cause} (PJM code {ending.code})"
            advice = MORE_MEMORY if ending.code in (12, 23) else ending.advice
            return Cause(PJM_STATUSES.get(ending.code, runs.FAILED), description, advice, ending.retry)
    for word in re.findall(r"[A-Z_]+", status.raw):
        if word == "LAUNCH_FAILED" and status.reason:  # a file, or a program that is missing
            plain = CAUSES_BY_STATE[word]
            return replace(
                plain, cause=f"{plain.cause}: {status.reason}", advice=f"remove the cause, and {plain.advice}"
            )
        if word in CAUSES_BY_STATE:
            return CAUSES_BY_STATE[word]
    if status.state == REJECTED:
        return Cause(runs.REFUSED, f"rejected: {status.reason or status.raw}", "correct it and submit it again", NEVER)
    if status.state == CANCELLED:
        reason = f": {status.reason}" if status.reason else ""
        return replace(CANCELLED_BY_USER, cause=CANCELLED_BY_USER.cause + reason)
    return None
