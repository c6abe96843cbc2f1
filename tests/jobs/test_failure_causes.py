"""Tests of the causes that states and codes of schedulers stand for."""

from __future__ import annotations

from typing import Optional

import pytest

from fugaku_gpt.jobs.failure_causes import CAUSES_BY_STATE, MORE_MEMORY, Cause, scheduler_cause
from fugaku_gpt.records.job import CANCELLED, ENDED, REJECTED, JobStatus


def of_code(code: Optional[int]) -> Optional[Cause]:
    return scheduler_cause("pjm", JobStatus("1", ENDED, "EXT", code=code))


@pytest.mark.parametrize(
    ("code", "status"),
    [(1, "interrupted"), (2, "refused"), (3, "refused"), (6, "interrupted"), (7, "interrupted"), (8, "refused"),
     (9, "interrupted"), (11, "timeout"), (12, "oom"), (16, "failed"), (18, "interrupted"), (20, "failed"),
     (23, "oom")],
)  # fmt: skip
def test_a_code_of_pjm_is_a_status(code: int, status: str) -> None:
    cause = of_code(code)
    assert cause is not None and cause.status == status
    assert cause.cause == "cancelled" if code == 1 else cause.cause.endswith(f"(PJM code {code})")
    assert (cause.advice == MORE_MEMORY) == (code in (12, 23))


@pytest.mark.parametrize("code", [None, 0, 4, 14])
def test_a_code_that_only_ends_the_job_is_no_cause(code: Optional[int]) -> None:
    assert of_code(code) is None


def test_codes_are_those_of_pjm_alone() -> None:
    assert scheduler_cause("slurm", JobStatus("1", ENDED, "COMPLETED", code=12)) is None


@pytest.mark.parametrize("state", sorted(CAUSES_BY_STATE))
def test_a_state_is_a_cause(state: str) -> None:
    assert scheduler_cause("slurm", JobStatus("1", ENDED, f"{state} by 1000")) == CAUSES_BY_STATE[state]


def test_jobs_that_were_rejected_or_cancelled() -> None:
    rejected = [scheduler_cause("slurm", JobStatus("1", REJECTED, "RJT", reason=reason)) for reason in ("full", "")]
    assert [cause and (cause.status, cause.cause) for cause in rejected] == [
        ("refused", "rejected: full"),
        ("refused", "rejected: RJT"),
    ]
    cancelled = [scheduler_cause("slurm", JobStatus("1", CANCELLED, reason=reason)) for reason in ("by root", "")]
    assert [cause and (cause.status, cause.cause) for cause in cancelled] == [
        ("interrupted", "cancelled: by root"),
        ("interrupted", "cancelled"),
    ]
