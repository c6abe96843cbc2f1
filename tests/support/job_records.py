"""Writes what submissions and job scripts leave in a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fugaku_gpt.records.job import append_event

SUBMITTED = 1_763_700_000.0  # 11-21 in UTC


def record_submission(
    directory: Path, job_id: str = "7", scheduler: str = "pjm", time: float = SUBMITTED, **values: Any
) -> None:
    """Record a submission, as ``job submit`` does."""
    facts = {"tag": f"t-{job_id}", "link": 1, "chain": 1, "bulk": "", **values}
    directory.mkdir(parents=True, exist_ok=True)
    append_event(directory, "submitted", time, scheduler=scheduler, job_id=job_id, **facts)


def write_exit_record(directory: Path, exit_code: int, sub_job: str = "7", signal: str = "") -> None:
    """Write the exit record that a job script writes at its end, here ten minutes after its start."""
    (directory / "exit").mkdir(exist_ok=True)
    record = {
        "version": 1, "job_id": sub_job.partition("[")[0], "sub_job": sub_job, "exit_code": exit_code, "signal": signal,
        "started": int(SUBMITTED) + 10, "ended": int(SUBMITTED) + 610, "host": "node",
    }  # fmt: skip
    (directory / "exit" / f"{sub_job}.json").write_text(json.dumps(record), encoding="utf-8")
