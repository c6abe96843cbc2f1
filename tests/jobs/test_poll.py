"""Tests that run directories are polled with a single query for each scheduler, and that changes are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.poll import job_directories, output_of, poll_runs, watch_runs
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.job import ENDED, QUEUED, RUNNING, UNKNOWN, JobStatus, append_event, read_events
from fugaku_gpt.records.run import RunDirectory
from tests.jobs.records import submitted_run, write_result
from tests.jobs.schedulers.fake import FakeScheduler
from tests.support.job_records import write_exit_record

UNREACHABLE = "pjstat: no such command on this machine"


class Unreachable(FakeScheduler):
    """A scheduler whose commands do not exist on this machine."""

    def poll(self, job_ids: Any) -> Dict[str, JobStatus]:
        raise UsageError(UNREACHABLE)

    def find(self, tags: Any) -> Dict[str, str]:
        raise UsageError(UNREACHABLE)


def site(*states: str) -> FakeScheduler:
    """Return a scheduler with jobs 1, 2, ... in these states."""
    scheduler = FakeScheduler()
    for number, state in enumerate(states, 1):
        scheduler.statuses[str(number)] = JobStatus(str(number), state, state[:3].upper())
    return scheduler


def kinds(directory: Path) -> List[str]:
    return [event.kind for event in read_events(directory)]


def test_a_single_query_covers_all_directories(tmp_path: Path) -> None:
    scheduler = site(QUEUED, RUNNING, RUNNING)
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for number, directory in enumerate(directories, 1):
        submitted_run(directory, str(number))
    seen = poll_runs(directories, lambda name: scheduler)
    assert [polled.outcome.state for polled in seen] == [QUEUED, RUNNING, RUNNING]
    assert [polled.job_id for polled in seen] == ["1", "2", "3"]
    assert scheduler.polls == [["1", "2", "3"]]


def test_a_change_is_recorded_once(tmp_path: Path) -> None:
    scheduler = site(QUEUED)
    submitted_run(tmp_path, "1")
    for _ in range(3):
        poll_runs([tmp_path], lambda name: scheduler)
    scheduler.statuses["1"] = JobStatus("1", RUNNING, "RUN")
    poll_runs([tmp_path], lambda name: scheduler)
    assert kinds(tmp_path) == ["submitted", "status", "status"]


def test_a_finished_job_is_not_queried_again(tmp_path: Path) -> None:
    scheduler = site(ENDED)
    submitted_run(tmp_path, "1")
    write_exit_record(tmp_path, 0, sub_job="1")
    write_result(tmp_path, runs.OK)
    assert [poll_runs([tmp_path], lambda name: scheduler)[0].outcome.status for _ in range(2)] == [runs.OK, runs.OK]
    assert scheduler.polls == [["1"]]


def test_a_lost_job_is_queried_again(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    submitted_run(tmp_path, "1")
    assert poll_runs([tmp_path], lambda name: scheduler)[0].outcome.status == runs.LOST
    scheduler.statuses["1"] = JobStatus("1", RUNNING, "RUN")
    assert poll_runs([tmp_path], lambda name: scheduler)[0].outcome.state == RUNNING


def test_a_finished_job_whose_ranks_left_nothing_gets_a_result(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    scheduler.statuses["1"] = JobStatus("1", ENDED, "EXT", 0, 24, 11)
    submitted_run(tmp_path, "1")
    poll_runs([tmp_path], lambda name: scheduler, clock=lambda: 500.0)
    recorded_result = RunDirectory(tmp_path).result()
    assert recorded_result is not None and (recorded_result.status, recorded_result.ended, recorded_result.judged) == (
        runs.TIMEOUT,
        500.0,
        True,
    )


def test_without_a_scheduler_our_own_records_are_still_reported(tmp_path: Path) -> None:
    submitted_run(tmp_path / "a", "1")
    submitted_run(tmp_path / "b", "2")
    write_exit_record(tmp_path / "b", 0, sub_job="2")
    write_result(tmp_path / "b", runs.OK)
    waiting, ended = poll_runs([tmp_path / "a", tmp_path / "b"], lambda name: Unreachable())
    assert (waiting.outcome.state, waiting.outcome.cause) == (UNKNOWN, UNREACHABLE)
    assert ended.outcome.status == runs.OK


def test_an_unknown_state_does_not_replace_the_recorded_state(tmp_path: Path) -> None:
    scheduler = site(RUNNING)
    submitted_run(tmp_path, "1")
    poll_runs([tmp_path], lambda name: scheduler)
    assert poll_runs([tmp_path], lambda name: Unreachable())[0].outcome.state == UNKNOWN
    assert kinds(tmp_path) == ["submitted", "status"]


def test_an_open_submission_is_looked_up_by_tag(tmp_path: Path) -> None:
    append_event(tmp_path, "intent", 1.0, scheduler="pjm", tag="t-1", link=1, chain=1, bulk="")
    assert UNREACHABLE in poll_runs([tmp_path], lambda name: Unreachable(), clock=lambda: 2.0)[0].outcome.cause
    scheduler = site(RUNNING)
    assert poll_runs([tmp_path], lambda name: scheduler, clock=lambda: 2.0)[0].outcome.state == UNKNOWN
    scheduler.tags["t-1"] = "1"
    (seen,) = poll_runs([tmp_path], lambda name: scheduler, clock=lambda: 2.0)
    assert (seen.job_id, seen.outcome.state) == ("1", RUNNING)
    append_event(tmp_path, "intent", 1.0, scheduler="pjm", tag="t-2", link=1, chain=1, bulk="")
    poll_runs([tmp_path], lambda name: scheduler, clock=lambda: 1000.0)
    assert kinds(tmp_path)[-1] == "abandoned"


def test_a_single_query_looks_up_the_open_submissions_of_all_directories(tmp_path: Path) -> None:
    scheduler, searches = site(RUNNING, QUEUED), []
    find = scheduler.find

    def counted(tags: Any) -> Dict[str, str]:
        searches.append(list(tags))
        return find(tags)

    scheduler.find = counted  # type: ignore
    scheduler.tags = {"t-a": "1", "t-b": "2"}
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        append_event(tmp_path / name, "intent", 1.0, scheduler="pjm", tag=f"t-{name}", link=1, chain=1, bulk="")
    seen = poll_runs([tmp_path / name for name in ("a", "b", "c")], lambda name: scheduler, clock=lambda: 1000.0)
    assert (searches, scheduler.polls) == ([["t-a", "t-b", "t-c"]], [["1", "2"]])
    assert [(polled.job_id, polled.outcome.state) for polled in seen] == [("1", RUNNING), ("2", QUEUED), ("", "")]
    assert kinds(tmp_path / "c") == ["intent", "abandoned"]


def test_an_open_submission_in_a_read_only_directory_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = site(RUNNING)
    scheduler.tags = {"t-1": "1"}
    append_event(tmp_path, "intent", 1.0, scheduler="pjm", tag="t-1", link=1, chain=1, bulk="")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fugaku_gpt.jobs.submission.append_event", refuse)
    (seen,) = poll_runs([tmp_path], lambda name: scheduler)
    assert seen.outcome.state == UNKNOWN and "job.jsonl: cannot be written: Permission denied" in seen.outcome.cause


def test_a_scheduler_without_an_answer_is_reported_for_every_job(tmp_path: Path) -> None:
    submitted_run(tmp_path, "1")
    write_exit_record(tmp_path, 0, sub_job="1")
    write_result(tmp_path, runs.OK)
    (silent,) = poll_runs([tmp_path], lambda name: Unreachable())
    assert silent.outcome.status == runs.OK and silent.unanswered == {"job 1": UNREACHABLE}
    scheduler = site(ENDED)
    (seen,) = poll_runs([tmp_path], lambda name: scheduler)
    assert seen.outcome.status == runs.OK and seen.unanswered == {}


def test_each_ended_sub_job_is_recorded(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    submitted_run(tmp_path, "1", bulk="0-1")
    statuses = {
        "1": JobStatus("1", RUNNING, "EXT:1 RUN:1"),
        "1[0]": JobStatus("1[0]", ENDED, "EXT", 0, 24, 11),
        "1[1]": JobStatus("1[1]", RUNNING, "RUN"),
    }
    scheduler.poll = lambda ids: statuses  # type: ignore
    (seen,) = poll_runs([tmp_path], lambda name: scheduler)
    assert (seen.outcome.state, seen.outcome.cause) == (RUNNING, "1 of 2 sub-jobs have ended")
    assert [event.values["job_id"] for event in read_events(tmp_path) if event.kind == "status"] == ["1", "1[0]"]


def test_a_read_only_directory_is_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = FakeScheduler()
    scheduler.statuses["1"] = JobStatus("1", ENDED, "EXT", 0, 24, 11)
    submitted_run(tmp_path, "1")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fugaku_gpt.jobs.poll.append_status", refuse)
    monkeypatch.setattr("fugaku_gpt.jobs.poll.record_result", refuse)
    assert poll_runs([tmp_path], lambda name: scheduler)[0].outcome.status == runs.TIMEOUT


def test_watching_ends_when_all_are_over_and_waits_longer_while_nothing_happens(tmp_path: Path) -> None:
    scheduler, slept = site(QUEUED), []
    submitted_run(tmp_path, "1")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 6:
            scheduler.statuses["1"] = JobStatus("1", RUNNING, "RUN")
        if len(slept) == 9:
            scheduler.statuses["1"] = JobStatus("1", ENDED, "EXT", 0, 24, 11)

    states = [
        polled.outcome.state for (polled,) in watch_runs([tmp_path], lambda name: scheduler, sleep=sleep, max_wait=8.0)
    ]
    assert states == [QUEUED] * 5 + [RUNNING] * 3 + [ENDED]
    assert slept == [0.0, 2.0, 4.0, 8.0, 8.0, 8.0, 2.0, 4.0, 8.0]


def test_run_directories_are_collected_from_nested_folders_without_earlier_attempts(tmp_path: Path) -> None:
    for name in ("sweep/b", "sweep/a", "sweep/attempts/a/1", "lone", "lone/repeat-0"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("sweep/b", "sweep/a", "sweep/attempts/a/1", "lone"):
        submitted_run(tmp_path / name)
    directories = job_directories([tmp_path, tmp_path / "lone"])
    assert [str(path.relative_to(tmp_path)) for path in directories] == ["lone", "sweep/a", "sweep/b"]


def test_a_folder_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        job_directories([tmp_path / "none"])
    with pytest.raises(
        UsageError, match="holds no run directory with a job .*for a run without a job: `fugaku-gpt doctor "
    ):
        job_directories([tmp_path])


def test_output_files_come_from_the_job_s_scheduler(tmp_path: Path) -> None:
    scheduler = site(RUNNING)
    submitted_run(tmp_path, "1")
    (tmp_path / "gpt.1.out").touch()
    scheduler.outputs = [tmp_path / "gpt.1.out", tmp_path / "gpt.1.err"]
    (seen,) = poll_runs([tmp_path], lambda name: scheduler)
    assert output_of(seen, lambda name: scheduler) == [tmp_path / "gpt.1.out"]


def test_a_damaged_record_is_reported_with_the_file_and_hides_no_other_run(tmp_path: Path) -> None:
    damaged, sound = tmp_path / "damaged", tmp_path / "sound"
    submitted_run(damaged, "1")
    submitted_run(sound, "2")
    (damaged / "exit").mkdir()
    (damaged / "exit" / "1.json").write_text(json.dumps([]), encoding="utf-8")
    first, second = poll_runs([damaged, sound], lambda name: site(ENDED, RUNNING))
    assert "1.json: not an exit record" in first.outcome.cause
    assert (first.job_id, first.outcome.state, first.is_over) == ("1", UNKNOWN, False)
    assert second.outcome.state == RUNNING
