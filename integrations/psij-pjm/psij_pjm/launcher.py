"""Starts the processes of a job by PJM's ``mpiexec``."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from psij import JobExecutorConfig
from psij.launchers.multiple import MultipleLauncher


class PjmMpiexecLauncher(MultipleLauncher):
    """The launcher ``pjm_mpiexec``: as many ranks as ``process_count`` asks for.

    On Fugaku ``mpiexec`` itself prints nothing of what ranks print, and writes a file for each rank: their lines are
    appended to the job's ``stdout_path`` and ``stderr_path`` while ranks run, those of a moment in the order of ranks.
    """

    def __init__(self, config: Optional[JobExecutorConfig] = None) -> None:
        super().__init__(Path(__file__).parent / "scripts" / "pjm_mpiexec.sh", config)
