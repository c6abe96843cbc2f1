"""A program that kills submissions of a sweep before each of their changes of a file, and prints JSON.

The argument is a folder. For every n, two processes in a row submit the same sweep and die at their n-th change, if
they come that far; a third one is left alone. Then each run must have one job, however often it was asked for. For
each n the JSON has the number of kills, the jobs of each run, and how many jobs the scheduler had accepted when a
process died that had not yet recorded them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Optional, Tuple

from fugaku_gpt.records.job import read_history
from fugaku_gpt.sweep.plan import SweepPlan, plan_of
from fugaku_gpt.sweep.submit import submit_sweep
from tests.support.prepared_corpus import PREPARED
from tests.sweep.fake_scheduler import FakeScheduler

TEXT = f"""
preset: tiny
defaults: {{data.paths: [{PREPARED}], job.elapse: 0:30:00, job.nodes: 1}}
matrix: {{layout.tp: [1, 2, 3]}}
"""
RUNS = ["dp1-tp1-r1", "dp1-tp2-r1"]  # that with tp=3 is refused
CHANGES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate")
PATIENCE_SECONDS = 1000.0  # more than an intent without a job is believed


def die_at_change(nth: int) -> None:
    """Kills this process before its ``nth`` change of a file or a folder."""
    seen = 0

    def count(event: str, arguments: Tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def is_killed(plan: SweepPlan, folder: Path, seconds: float, nth: Optional[int]) -> bool:
    """Submits the sweep in a process of its own, and whether that was killed."""
    process = os.fork()
    if process == 0:
        try:
            if nth is not None:
                die_at_change(nth)
            queue = folder / "queue"
            submit_sweep(plan, folder / "out", scheduler_factory=lambda _: FakeScheduler(queue), clock=lambda: seconds)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), f"a submission has failed: {status}"
    return status == signal.SIGKILL


def unrecorded(folder: Path) -> int:
    """Jobs that the scheduler has accepted and no run's record knows."""
    recorded = sum(len(read_history(folder / "out" / run).jobs) for run in RUNS)
    return len(FakeScheduler(folder / "queue").jobs()) - recorded


def main() -> None:
    """Kill at the first change, the second, ... until a submission is over before its n-th."""
    root = Path(sys.argv[1])
    file = root / "s.yaml"
    file.write_text(TEXT, encoding="utf-8")
    plan = plan_of(file, ("job.scheduler=slurm",))
    # what the first submission imports and compiles, the others inherit
    submit_sweep(plan, root / "first", scheduler_factory=lambda _: FakeScheduler(root / "queue"), clock=lambda: 1e9)
    rows = []
    while not rows or rows[-1]["kills"]:
        nth = len(rows) + 1
        folder = root / str(nth)
        folder.mkdir()
        kills = accepted = 0
        for attempt, limit in enumerate((nth, nth, None)):
            if is_killed(plan, folder, 1e9 + PATIENCE_SECONDS * attempt, limit):
                kills += 1
                accepted += unrecorded(folder)
        rows.append(
            {
                "kills": kills,
                "jobs": Counter(job["run"] for job in FakeScheduler(folder / "queue").jobs()),
                "unrecorded": accepted,
            }
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
