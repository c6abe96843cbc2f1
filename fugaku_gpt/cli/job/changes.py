"""Lines that say what has changed in jobs that are followed: for people, or as JSON for other programs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Sequence, Tuple

from fugaku_gpt.cli.output import echo
from fugaku_gpt.errors import RunFailed

if TYPE_CHECKING:
    from fugaku_gpt.jobs.poll import PolledRun


def text_lines(run: PolledRun) -> Tuple[object, Callable[[float], str]]:
    """Return what a line about a job shows, for comparison, and the line for a time in seconds since the epoch: local
    time, run directory, job id, state or status, and cause."""
    outcome = run.outcome
    cells = [run.job_id, outcome.status or outcome.state, outcome.cause]
    text = f"{run.directory}: {' '.join(cell for cell in cells if cell)}"
    return text, lambda now: f"{time.strftime('%H:%M:%S', time.localtime(now))} {text}"


def json_lines(run: PolledRun) -> Tuple[object, Callable[[float], str]]:
    """Return the same with the line as a JSON object; see :func:`job_object`."""
    values = job_object(run)
    return values, lambda now: json.dumps({"time": round(now, 3), **values}).replace("\x7f", "\\u007f")


def job_object(run: PolledRun) -> Dict[str, Any]:
    """Return what is known of a job as values of JSON: those of the table of `job status`, with its scheduler, link and
    chain, whether it is over, and whether it may be submitted again (``retry``). What is not known is null."""
    outcome = run.outcome
    return {
        "run": str(run.directory) if run.is_recorded else None,
        "scheduler": run.scheduler or None,
        "job": run.job_id or None,
        "link": run.link or None,
        "chain": run.chain or None,
        "state": outcome.state or None,
        "status": outcome.status or None,
        "is_over": run.is_over,
        "cause": outcome.cause or None,
        "advice": outcome.advice or None,
        "retry": outcome.retry if run.is_over else None,
    }


def print_changes(
    steps: Iterable[List[PolledRun]],
    lines: Callable[[PolledRun], Tuple[object, Callable[[float], str]]] = text_lines,
    err: bool = False,
) -> List[PolledRun]:
    """Print a line for each job when it is first polled and whenever it has changed; return the last poll.

    Args:
        steps: the polls, as of :func:`fugaku_gpt.jobs.poll.watch_polls`.
        lines: makes the line of a job.
        err: whether lines go to standard error.
    """
    shown: Dict[Tuple[Path, str], object] = {}
    last: List[PolledRun] = []
    for last in steps:
        now = time.time()
        for run in last:
            key = (run.directory, "" if run.is_recorded else run.job_id)
            values, line = lines(run)
            if key not in shown or shown[key] != values:
                shown[key] = values
                echo(line(now), err=err)
        (sys.stderr if err else sys.stdout).flush()
    return last


def require_success(runs: Sequence[PolledRun]) -> None:
    """Check that all jobs have ended well.

    Raises:
        RunFailed: some have not; the message names them.
    """
    failed = [run for run in runs if run.outcome.status != "ok"]
    if failed:
        names = ", ".join(str(run.directory) for run in failed)
        raise RunFailed(f"{len(failed)} of {len(runs)} did not end well: {names}")
