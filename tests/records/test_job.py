"""Tests of the jobs recorded in a run directory, also where a kill or another program has damaged the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records import job as jobs
from fugaku_gpt.records.job import (
    JobEvent,
    JobStatus,
    aggregate_status,
    append_event,
    append_status,
    bulk_numbers,
    exit_records,
    history_of,
    read_events,
    read_history,
)
from tests.support.job_records import record_submission

RECORD = {
    "version": 1,
    "job_id": "239",
    "sub_job": "239[1]",
    "exit_code": 75,
    "signal": "TERM",
    "started": 10,
    "ended": 20,
    "host": "node",
}


def submit(directory: Path, job_id: str, tag: str = "t", link: int = 1) -> None:
    """Records an intent and the submission."""
    facts: Dict[str, Any] = {"tag": tag, "link": link, "chain": 2, "bulk": ""}
    append_event(directory, "intent", 2.0, scheduler="pjm", **facts)
    record_submission(directory, job_id, time=2.0, **facts)


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    status = JobStatus("7", jobs.RUNNING, "RUN", reason="é\n\u2028", group="small")
    append_event(tmp_path, "submitted", 1.5, scheduler="pjm", job_id="7")
    append_status(tmp_path, 2.5, status)
    events = read_events(tmp_path)
    assert [(event.kind, event.time) for event in events] == [("submitted", 1.5), ("status", 2.5)]
    assert read_history(tmp_path).statuses == {"7": status}


def test_a_directory_without_jobs_has_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) == jobs.JobHistory()


def test_a_line_that_a_kill_has_cut_costs_no_other_line(tmp_path: Path) -> None:
    submit(tmp_path, "1")
    with open(tmp_path / jobs.JOB_FILE, "ab") as stream:
        stream.write(b'{"kind": "submitted", "time": 3, "job')
    append_event(tmp_path, "cancelled", 4.0, job_id="1")
    history = read_history(tmp_path)
    assert ([job.job_id for job in history.jobs], history.cancelled) == (["1"], ("1",))


def test_an_intent_is_open_until_an_end_is_recorded(tmp_path: Path) -> None:
    append_event(tmp_path, "intent", 1.0, scheduler="pjm", tag="a", link=1, chain=1, bulk="")
    append_event(tmp_path, "intent", 2.0, scheduler="pjm", tag="b", link=1, chain=1, bulk="")
    append_event(tmp_path, "intent", 3.0, scheduler="pjm", tag="c", link=1, chain=1, bulk="")
    assert [intent.tag for intent in read_history(tmp_path).open] == ["a", "b", "c"]
    append_event(tmp_path, "refused", 4.0, tag="b", reason="no group")
    append_event(tmp_path, "abandoned", 5.0, tag="c", reason="never taken")
    history = read_history(tmp_path)
    assert ([intent.tag for intent in history.open], history.refused) == (["a"], "never taken")
    submit(tmp_path, "9", tag="a")
    history = read_history(tmp_path)
    assert (history.open, history.refused, history.jobs[0].tag) == ((), "", "a")


def test_links_of_a_chain_stand_in_their_order(tmp_path: Path) -> None:
    submit(tmp_path, "5_1", tag="b", link=2)
    submit(tmp_path, "5_0", tag="a", link=1)
    assert [job.job_id for job in read_history(tmp_path).jobs] == ["5_0", "5_1"]


def test_a_new_attempt_begins_anew(tmp_path: Path) -> None:
    submit(tmp_path, "1")
    append_status(tmp_path, 3.0, JobStatus("1", jobs.ENDED))
    append_event(tmp_path, "attempt", 4.0, number=1)
    history = read_history(tmp_path)
    assert (history.jobs, history.statuses, history.attempts) == ((), {}, 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(
    ["scheduler", "tag", "job_id", "link", "chain", "bulk", "number", "reason", "state", "raw", "exit_code"]
)
kinds = st.sampled_from(["intent", "submitted", "refused", "abandoned", "status", "cancelled", "attempt", "other"])


@settings(max_examples=40)
@given(st.lists(st.tuples(kinds, st.dictionaries(names, values, max_size=8)), max_size=6))
@pytest.mark.slow
@example([("attempt", {"number": float("inf")})])
def test_no_line_of_another_program_stops_the_reading(lines: List[Any]) -> None:
    history_of(JobEvent(kind, 1.0, fields) for kind, fields in lines)


def test_exit_records_are_read_by_sub_job(tmp_path: Path) -> None:
    assert exit_records(tmp_path) == {}
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit" / "239[1].json").write_text(json.dumps({**RECORD, "more": 1}), encoding="utf-8")
    (tmp_path / "exit" / ".239[2].tmp").write_text('{"vers', encoding="utf-8")
    (record,) = exit_records(tmp_path).values()
    assert (record.sub_job, record.exit_code, record.signal) == ("239[1]", 75, "TERM")


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', json.dumps({**RECORD, "version": 2})])
def test_a_damaged_exit_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit" / "1.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="1.json: (not an exit record|version 2)"):
        exit_records(tmp_path)


@pytest.mark.parametrize(
    ("states", "bulk_state"),
    [
        ([jobs.QUEUED, jobs.QUEUED], jobs.QUEUED),
        ([jobs.QUEUED, jobs.RUNNING], jobs.RUNNING),
        ([jobs.ENDED, jobs.QUEUED], jobs.RUNNING),
        ([jobs.ENDED, jobs.UNKNOWN], jobs.UNKNOWN),
        ([jobs.ENDED, jobs.CANCELLED], jobs.CANCELLED),
        ([jobs.ENDED, jobs.LOST, jobs.CANCELLED], jobs.LOST),
        ([jobs.ENDED, jobs.ENDED], jobs.ENDED),
        ([], jobs.LOST),
    ],
)
def test_a_bulk_job_is_over_when_all_sub_jobs_are(states: List[str], bulk_state: str) -> None:
    sub_jobs = [JobStatus(f"5[{number}]", state) for number, state in enumerate(states)]
    assert aggregate_status("5", sub_jobs).state == bulk_state


def test_the_first_number_that_is_not_0_counts() -> None:
    sub_jobs = [
        JobStatus("5[1]", jobs.ENDED, "EXT", 0),
        JobStatus("5[2]", jobs.ENDED, "EXT", 3, None, 0),
        JobStatus("5[10]", jobs.ENDED, "EXT", 4, 9, 12),
    ]
    bulk_job = aggregate_status("5", sub_jobs)
    assert (bulk_job.exit_code, bulk_job.signal, bulk_job.code, bulk_job.raw) == (3, 9, 12, "EXT:3")
    assert aggregate_status("5", [JobStatus("5[0]", jobs.ENDED)]).exit_code is None
    refused = [JobStatus("5[1]", jobs.ENDED, "EXT", 0), JobStatus("5[2]", jobs.ENDED, "EXT", -1)]
    assert aggregate_status("5", refused).exit_code == -1


def test_bulk_numbers_are_a_range() -> None:
    assert bulk_numbers("") == []
    assert bulk_numbers("3-5") == [3, 4, 5]
    for text in ("5-3", "a-b", "1-", "-1", "1-2-3"):
        with pytest.raises(UsageError, match="such as 0-9"):
            bulk_numbers(text)
