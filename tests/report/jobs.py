"""Makes run directories such as jobs leave, and a scheduler with scripted answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.protocol import Accounting
from fugaku_gpt.records.job import ENDED, JobStatus, append_status
from tests.support.job_records import SUBMITTED

STATS = """\
 Job Statistical Information
 ------------------------------------------------------------
 JOB ID                                  : {job_id}
 JOB NAME                                : run
 EXIT CODE                               : 0
 SIGNAL NO                               : 0
 PJM CODE                                : {code}
 REASON                                  : {reason}
 NODE NUM (REQUIRE)                      : 4:noncont
 NODE NUM (ALLOC)                        : 4:2x2:noncont
 NODE NUM (USE)                          : 4
 ELAPSE TIME (USE)                       : {elapse}
 MAX MEMORY SIZE (USE)                   : 8.0 GiB (8589934592)
 AVG POWER CONSUMPTION OF NODE (IDEAL)   : 380.000000
 AVG POWER CONSUMPTION OF NODE (MEASURED) : 400.000000
 ENERGY CONSUMPTION OF NODE (IDEAL)      : 63.333333
 ENERGY CONSUMPTION OF NODE (MEASURED)   : 66.666667
 POWER CAPPING DATE                      : {capped}
 freq (REQUIRE)                          : 2200
 freq (ALLOC)                            : 2200
 freq (USE)                              : {freq}
 retention_state (USE)                   : 0
 eco_state (USE)                         : 2
"""


def stats(job_id: str, **values: str) -> str:
    """Text of the statistics file of a job of 600 s on four nodes that draw 400 W together."""
    defaults = {"code": "0", "reason": "-", "elapse": "00:10:00 (600)", "capped": "-", "freq": "2200"}
    return STATS.format(job_id=job_id, **{**defaults, **values})


def record_end(directory: Path, job_id: str, state: str = ENDED, **values: Any) -> None:
    """Records the status with which a scheduler reports the end of a job."""
    append_status(directory, SUBMITTED + 700, JobStatus(job_id, state, **values))


class ScriptedScheduler:
    """A scheduler that gives scripted answers and records the job ids that it was asked for."""

    name = "pjm"

    def __init__(
        self,
        statuses: Optional[Dict[str, JobStatus]] = None,
        accounting: Optional[Accounting] = None,
        trouble: str = "",
        tags: Optional[Dict[str, str]] = None,
        sub_jobs: Sequence[JobStatus] = (),
    ) -> None:
        self.statuses = statuses or {}
        self.account = accounting
        self.trouble = trouble
        self.tags = tags or {}
        self.sub_jobs = {status.job_id: status for status in sub_jobs}
        self.asked: List[List[str]] = []

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        if self.trouble:
            raise UsageError(self.trouble)
        return {tag: self.tags[tag] for tag in tags if tag in self.tags}

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        self.asked.append(list(job_ids))
        if self.trouble:
            raise UsageError(self.trouble)
        return {**self.sub_jobs, **{job_id: self.statuses[job_id] for job_id in job_ids if job_id in self.statuses}}

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        if self.trouble:
            raise UsageError(self.trouble)
        return self.account
