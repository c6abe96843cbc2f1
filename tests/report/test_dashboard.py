"""Tests of following runs and their jobs."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any, List, Sequence

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.outcome import Outcome
from fugaku_gpt.jobs.poll import PolledRun
from fugaku_gpt.records.job import ENDED, RUNNING
from fugaku_gpt.records.run import OK
from fugaku_gpt.report.dashboard import Dashboard, JobPoller
from fugaku_gpt.report.page_runs import named_runs
from tests.sweep.fake import leave_run


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def no_jobs(directories: Sequence[Path]) -> List[PolledRun]:
    raise AssertionError("no run has a job")


def names(dashboard: Dashboard) -> List[str]:
    return [f"{status.name} {status.status} {status.iteration}" for _, status in dashboard.statuses()]


def test_runs_appear_end_and_are_removed(tmp_path: Path) -> None:
    clock = Clock()
    with Dashboard([tmp_path], no_jobs, clock) as dashboard:
        dashboard.look()
        assert names(dashboard) == []
        leave_run(tmp_path / "b", load_run_config(preset="tiny"), status=None)
        clock.seconds += 5
        dashboard.look()
        assert names(dashboard) == ["b running 4"]
        leave_run(tmp_path / "a", load_run_config(preset="tiny"), "failed", "why")
        clock.seconds += 5
        dashboard.look()
        assert names(dashboard) == ["a failed 4", "b running 4"]
        shutil.rmtree(tmp_path / "a")
        dashboard.look()
        assert names(dashboard) == ["b running 4"]
    with pytest.raises(UsageError, match="no such folder"):
        Dashboard([tmp_path / "a"])


def test_a_folder_that_cannot_be_searched_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_run(tmp_path / "a", load_run_config(preset="tiny"))
    clock = Clock()
    with Dashboard([tmp_path], no_jobs, clock) as dashboard:
        dashboard.look()

        def refuse(*_: object) -> None:
            raise OSError(116, "Stale file handle", str(tmp_path))

        with monkeypatch.context() as patch:
            patch.setattr("fugaku_gpt.report.dashboard.named_runs", refuse)
            clock.seconds += 5
            dashboard.look()
        assert names(dashboard) == ["a ok 4"]
        leave_run(tmp_path / "b", load_run_config(preset="tiny"))
        clock.seconds += 5
        dashboard.look()
        assert names(dashboard) == ["a ok 4", "b ok 4"]


def with_job(path: Path) -> Path:
    path.mkdir()
    (path / "job.jsonl").write_text("{}\n")
    return path


def test_schedulers_are_asked_at_the_intervals_of_job_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [with_job(tmp_path / "a"), with_job(tmp_path / "b")]
    asked: List[Sequence[Path]] = []
    waited: List[float] = []

    def poll(directories: Sequence[Path]) -> List[PolledRun]:
        asked.append(directories)
        is_over = len(asked) >= 8
        status, job = (OK, ENDED) if is_over else ("", RUNNING)
        return [PolledRun(path, Outcome(status, job), "pjm", "7") for path in directories]

    poller = JobPoller(poll)
    monkeypatch.setattr(poller, "_sleep", waited.append)
    poller.follow(runs)
    assert poller._thread is not None
    poller._thread.join()
    assert asked == [runs] * 8  # one query for all jobs
    assert waited == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert [run.outcome.state for run in poller.newest.values()] == [ENDED, ENDED]
    thread = poller._thread
    poller.follow(runs)
    assert poller._thread is thread and len(asked) == 8  # all are over
    with open(runs[0] / "job.jsonl", "a", encoding="utf-8") as stream:
        stream.write("{}\n")  # as when it is submitted again
    poller.follow(runs)
    assert poller._thread is not thread
    poller._thread.join()
    assert len(asked) == 9
    poller.close()


def test_a_poller_that_fails_waits_and_says_so(tmp_path: Path) -> None:
    clock, runs, asked = Clock(), [with_job(tmp_path / "a")], threading.Semaphore(0)

    def poll(directories: Sequence[Path]) -> List[PolledRun]:
        asked.release()
        raise UsageError("a\x1b[2Jdisk is gone")

    poller = JobPoller(poll, clock)
    poller.follow(runs)
    assert poller._thread is not None
    poller._thread.join()
    assert poller.problem == "jobs are not followed: a\\x1b[2Jdisk is gone"
    clock.seconds += 59
    poller.follow(runs)
    assert asked.acquire(blocking=False) and not asked.acquire(blocking=False)
    clock.seconds += 1
    poller.follow(runs)
    assert asked.acquire(timeout=60)
    poller._thread.join()
    poller.close()


def test_a_closed_poller_asks_nobody(tmp_path: Path) -> None:
    poller = JobPoller(no_jobs)
    poller.close()
    poller.follow([with_job(tmp_path / "a")])
    assert poller._thread is not None
    poller._thread.join()
    assert poller.problem == "" and poller.newest == {}


def test_folders_are_searched_again_after_a_change_or_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_run(tmp_path / "a", load_run_config(preset="tiny"))
    clock = Clock()
    searches = []

    def counted(*arguments: Any) -> Any:
        searches.append(clock.seconds)
        return named_runs(*arguments)

    monkeypatch.setattr("fugaku_gpt.report.dashboard.named_runs", counted)
    with Dashboard([tmp_path], no_jobs, clock) as dashboard:
        searches.clear()
        dashboard.look()
        first = len(searches)
        dashboard.look()
        assert len(searches) == first
        leave_run(tmp_path / "b", load_run_config(preset="tiny"))
        dashboard.look()
        assert len(searches) == first + 1 and names(dashboard) == ["a ok 4", "b ok 4"]
        clock.seconds += 600
        dashboard.look()
        assert len(searches) == first + 2
