"""Tests of the end of a job, read from Slurm, PJM and the run's own settings."""

from __future__ import annotations

import time

from fugaku_gpt.config.schema import JobConfig
from fugaku_gpt.machine.job_limit import STARTED_VARIABLE, job_limits, read_job_limit


def test_nobody_sets_a_limit() -> None:
    assert read_job_limit(JobConfig(), {}) is None
    assert read_job_limit(JobConfig(), {"PJM_ELAPSE_LIMIT": "unlimited"}) is None


def test_pjm_counts_from_the_start_of_the_script() -> None:
    began = int(time.time()) - 40
    limit = read_job_limit(JobConfig(), {"PJM_ELAPSE_LIMIT": "600", STARTED_VARIABLE: str(began)}, started=0.0)
    assert limit is not None and (limit.end, limit.seconds, str(limit)) == (began + 600, 600, "0:10:00 (PJM)")


def test_slurm_knows_the_end_itself() -> None:
    variables = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "4600"}
    limit = read_job_limit(JobConfig(elapse=7200.0), variables, started=1000.0, moment=2000.0)
    assert limit is not None and (limit.end, limit.seconds, limit.source) == (4600, 3600, "Slurm")


def test_the_earliest_end_counts() -> None:
    limit = read_job_limit(JobConfig(elapse=60.0), {"PJM_ELAPSE_LIMIT": "600"}, started=500.0, moment=510.0)
    assert limit is not None and (limit.end, limit.source) == (560, "job.elapse")


def test_a_start_in_the_future_is_no_start() -> None:
    limit = read_job_limit(JobConfig(elapse=60.0), {STARTED_VARIABLE: str(int(time.time()) + 9999)}, 500.0, 510.0)
    assert limit is not None and limit.end == 560


def test_the_margin_is_a_tenth_and_five_minutes_at_most() -> None:
    short, long = (read_job_limit(JobConfig(elapse=elapse), {}, 500.0, 510.0) for elapse in (60.0, 86400.0))
    assert short is not None and long is not None
    assert (short.margin(None), long.margin(None), long.margin(30.0)) == (6.0, 300.0, 30.0)


def test_a_limit_that_is_past_does_not_count() -> None:
    variables = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "4600", "PJM_ELAPSE_LIMIT": "9000"}
    limit = read_job_limit(JobConfig(), variables, started=1000.0, moment=4600.0)
    assert limit is not None and limit.source == "PJM"
    assert [past.source for past in job_limits(JobConfig(), variables, 1000.0) if past.is_past(4600.0)] == ["Slurm"]
