"""The end of a run of which nobody is left: its launcher and its ranks are gone, and none has recorded how it ended.

As after a kill of `train --ranks` itself, whose MPI launcher takes all ranks with it, or after a crash of the machine.
The next command that reads the run records that.
"""

from __future__ import annotations

import contextlib
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Callable, Iterable, List, Optional, Set

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.hang.diagnosis import has_process, read_flights
from fugaku_gpt.launch.processes import living_marks
from fugaku_gpt.records.claim import is_holder_alive, newest_claim
from fugaku_gpt.records.job import JOB_FILE
from fugaku_gpt.records.run import CLAIM, LOST, Result, RunDirectory
from fugaku_gpt.records.summary import summarise


def conclude_lost_runs(directories: Iterable[Path]) -> List[Path]:
    """Record the end of runs of which no process is left; returns those whose end was recorded now."""
    marks = lru_cache(maxsize=1)(living_marks)  # once for all runs, and only if there is one to ask it about
    return [path for path in directories if conclude_lost_run(path, marks) is not None]


def conclude_lost_run(path: Path, marks: Callable[[], Set[str]] = living_marks) -> Optional[Result]:
    """Record that a run is lost; returns the result that was recorded, or None: see :func:`lost_result`."""
    result = lost_result(path, marks)
    with contextlib.suppress(OSError, UsageError):
        if result is not None and RunDirectory(path).write_result(result, replace=False):
            return result
    return None


def lost_result(path: Path, marks: Callable[[], Set[str]] = living_marks) -> Optional[Result]:
    """The result of a run that is lost: it has none, and no process of it lives on this machine, where it was started.

    Returns None for all others: the run has a result or a job, may still run, has processes on other
    machines or nobody knows where, is another user's, whose processes may be hidden from this one, or its folder cannot
    be read, which is no reason not to show it.

    Args:
        marks: returns the marks of all living processes.
    """
    directory, host = RunDirectory(path), socket.gethostname()
    with contextlib.suppress(OSError, UsageError):
        if (path / JOB_FILE).exists() or directory.result() is not None:
            return None
        number, holder = newest_claim(path, CLAIM)
        if holder is None or (path / f"{CLAIM}.{number}").stat().st_uid != os.getuid():
            return None
        if holder.host != host or holder.job or is_holder_alive(holder):
            return None
        heads = [flight.head for flight in read_flights(directory.flight_dir)]
        ranks = (directory.environment() or {}).get("ranks") or ()
        hosts = {*(head.host for head in heads), *(rank.get("host") for rank in ranks)}
        if hosts != {host} or any(map(has_process, heads)) or holder.name in marks():
            return None
        if newest_claim(path, CLAIM)[0] != number:  # it was resumed meanwhile
            return None
        return _lost(directory, f"process {holder.process} on {host}")
    return None


def _lost(directory: RunDirectory, holder: str) -> Result:
    """The result of a lost run, with what it has measured."""
    lines = directory.metrics("iteration")
    written = [path.stat().st_mtime for path in (directory.metrics_file, directory.log_file) if path.exists()]
    started = directory.config_file.stat().st_mtime
    summary = {}
    if lines:
        summary = summarise(load_run_config(directory.config_file), lines, directory.metrics("validation"))
    return Result(
        status=LOST,
        reason=f"{holder} and all ranks are gone, and none has recorded how it ended: they were killed from outside, "
        "or the machine has stopped",
        started=started,
        ended=max([started, *written]),
        iterations=directory.last_iteration(),
        summary=summary,
        judged=True,
        last_checkpoint=directory.last_checkpoint(),
    )
