"""Settings of the executor for PJM."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from psij import JobExecutorConfig


class PjmExecutorConfig(JobExecutorConfig):
    """Settings of :class:`psij_pjm.executor.PjmJobExecutor`.

    Args:
        launcher_log_file: see :class:`psij.JobExecutorConfig`.
        work_directory: folder of scripts, outputs and records, on a file system that nodes see.
        queue_polling_interval: seconds between two queries of PJM; one query asks for all jobs.
        initial_queue_polling_delay: seconds before the first query after a submission.
        lost_seconds: time for which a job that PJM does not know, and that has left no record, counts as open.
        keep_files: whether script and output of a job are kept when it has ended.
        is_linted: whether scripts are checked by the rules for Fugaku before they are submitted.
    """

    def __init__(
        self,
        launcher_log_file: Optional[Path] = None,
        work_directory: Optional[Path] = None,
        queue_polling_interval: float = 30.0,
        initial_queue_polling_delay: float = 2.0,
        lost_seconds: float = 300.0,
        keep_files: bool = False,
        is_linted: bool = True,
    ) -> None:
        super().__init__(launcher_log_file, work_directory)
        self.queue_polling_interval = queue_polling_interval
        self.initial_queue_polling_delay = initial_queue_polling_delay
        self.lost_seconds = lost_seconds
        self.keep_files = keep_files
        self.is_linted = is_linted

    @classmethod
    def with_defaults(cls, config: Optional[JobExecutorConfig]) -> "PjmExecutorConfig":
        """Return settings of this kind: the given ones, or those of another kind with all else at its default."""
        if isinstance(config, cls):
            return config
        if config is None:
            return cls()
        return cls(config.launcher_log_file, config.work_directory)
