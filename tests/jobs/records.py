"""Makes run directories of submitted jobs, with the results that ranks leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.records.run import Result, RunDirectory
from tests.support.job_records import SUBMITTED, record_submission


def submitted_run(directory: Path, job_id: str = "7", scheduler: str = "pjm", **values: Any) -> None:
    """A run of ten iterations with a submission on record."""
    record_submission(directory, job_id, scheduler, **values)
    if not (directory / "config.yaml").exists():
        settings = ["training.iterations=10", "job.elapse=1:00:00"]
        config = load_run_config(preset="tiny", overrides=settings)
        (directory / "config.yaml").write_text(dump_run_config(config), encoding="utf-8")


def write_result(directory: Path, status: str, reason: str = "", name: str = "") -> None:
    """The result of the ranks, in a sub-job's folder if it has a name."""
    path = directory / name if name else directory
    path.mkdir(exist_ok=True)
    RunDirectory(path).write_result(Result(status, reason, SUBMITTED + 10.0, SUBMITTED + 60.0, 10))
