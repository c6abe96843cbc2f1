"""When the batch system will end this job: a fact of the job, read here and nowhere else.

The batch system decides it (a range of limits, a limit of its own where the run names none), so no setting of the run
can hold it. PJM tells the limit and not when the job began; our job scripts export that.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import List, Mapping, Optional

import psutil

from fugaku_gpt.config.schema import JobConfig
from fugaku_gpt.config.values import format_duration

STARTED_VARIABLE = "FUGAKU_GPT_JOB_STARTED"  # seconds since the epoch, exported by our job scripts
_LONGEST_MARGIN = 300.0
_MARGIN_SHARE = 0.1


@dataclass(frozen=True)
class JobLimit:
    """The end that a job must not reach.

    Attributes:
        end: seconds since the epoch.
        seconds: the limit itself, counted from the job's start.
        source: who says so.
    """

    end: float
    seconds: float
    source: str

    def margin(self, configured: Optional[float]) -> float:
        """``job.stop_margin``, or a tenth of the limit, five minutes at most."""
        return configured if configured is not None else min(_LONGEST_MARGIN, _MARGIN_SHARE * self.seconds)

    def __str__(self) -> str:
        return f"{format_duration(self.seconds)} ({self.source})"


def read_job_limit(
    job: JobConfig, environment: Optional[Mapping[str, str]] = None, started: Optional[float] = None
) -> Optional[JobLimit]:
    """The earliest end that is known: by Slurm, by PJM, or by ``job.elapse``; None where nobody sets a limit.

    Args:
        started: when this process began, which stands for the job's start where no job script tells it; default: asked
            of the system.
    """
    variables = os.environ if environment is None else environment
    job_start = started if started is not None else float(psutil.Process().create_time())
    exported_start = _number(variables.get(STARTED_VARIABLE))
    if exported_start is not None and exported_start <= time.time():
        job_start = exported_start
    limits: List[JobLimit] = []
    end = _number(variables.get("SLURM_JOB_END_TIME"))
    if end is not None:
        begin = _number(variables.get("SLURM_JOB_START_TIME"))
        limits.append(JobLimit(end, end - (begin if begin is not None else job_start), "Slurm"))
    elapse = _number(variables.get("PJM_ELAPSE_LIMIT"))  # or "unlimited"
    if elapse is not None:
        limits.append(JobLimit(job_start + elapse, elapse, "PJM"))
    if job.elapse is not None:
        limits.append(JobLimit(job_start + job.elapse, job.elapse, "job.elapse"))
    return min(limits, key=lambda limit: limit.end, default=None)


def _number(text: Optional[str]) -> Optional[float]:
    return float(text) if text is not None and text.isdigit() else None
