"""The time at which the batch system will end this job, which is read only here.

The batch system chooses the limit (from a range, or its own default), so no setting of the run has it. PJM reports the
limit but not the start of the job, which our job scripts export.
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
LONGEST_MARGIN = 300.0  # seconds
_MARGIN_SHARE = 0.1


@dataclass(frozen=True)
class JobLimit:
    """The time at which a job is ended.

    Attributes:
        end: seconds since the epoch.
        seconds: the limit itself, counted from the job's start.
        source: who sets the limit.
    """

    end: float
    seconds: float
    source: str

    def margin(self, configured: Optional[float]) -> float:
        """``job.stop_margin``, or a tenth of the limit, five minutes at most."""
        return configured if configured is not None else min(LONGEST_MARGIN, _MARGIN_SHARE * self.seconds)

    def is_past(self, moment: Optional[float] = None) -> bool:
        """True if the job should have ended at a moment, in seconds since the epoch; default: the present."""
        return self.end <= (time.time() if moment is None else moment)

    def __str__(self) -> str:
        return f"{format_duration(self.seconds)} ({self.source})"


def read_job_limit(
    job: JobConfig,
    environment: Optional[Mapping[str, str]] = None,
    started: Optional[float] = None,
    moment: Optional[float] = None,
) -> Optional[JobLimit]:
    """The earliest end that is still to come: by Slurm, by PJM, or by ``job.elapse``; None if there is no limit.

    Args:
        environment, started: as in :func:`job_limits`.
        moment: the present, in seconds since the epoch; default: read from the clock.
    """
    limits = [limit for limit in job_limits(job, environment, started) if not limit.is_past(moment)]
    return min(limits, key=lambda limit: limit.end, default=None)


def job_limits(
    job: JobConfig, environment: Optional[Mapping[str, str]] = None, started: Optional[float] = None
) -> List[JobLimit]:
    """All limits that the environment and the run name, those that are past as well: a shell may have kept the
    variables of a job that is over.

    Args:
        started: start of this process, which counts as the job's start unless a job script exports that; default: read
            from the system.
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
    return limits


def _number(text: Optional[str]) -> Optional[float]:
    return float(text) if text is not None and text.isdecimal() else None
