"""Tests that job ids are read and written only by their own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.protocol import JobId
from fugaku_gpt.jobs.schedulers.registry import NAMES, is_job_id, is_present, read_job_id, scheduler_named, sub_job_ids
from fugaku_gpt.records.job import SubmittedJob


@pytest.mark.parametrize(
    ("scheduler", "text", "expected"),
    [
        ("pjm", "239", JobId("239", "239", 239)),
        ("pjm", "239[1]", JobId("239[1]", "239", 239, index=1)),
        ("pjm", "240_1", JobId("240_1", "240_1", 240, step=1)),  # a link of a chain was submitted by itself
        ("slurm", "92", JobId("92", "92", 92)),
        ("slurm", "92_3", JobId("92_3", "92", 92, index=3)),
        ("local", "local-7", JobId("local-7", "local-7", 7)),
        ("local", "local-7[3]", JobId("local-7[3]", "local-7", 7, index=3)),
    ],
)
def test_a_job_id_is_parsed_into_fields(scheduler: str, text: str, expected: JobId) -> None:
    assert scheduler_named(scheduler).parse_job_id(text) == expected
    assert read_job_id(scheduler, text) == expected and is_job_id(text)


@pytest.mark.parametrize(
    ("scheduler", "texts"),
    [
        ("pjm", ("", "local-7", "239[", "239[1-2]", "240_", "238-240")),
        ("slurm", ("", "local-7", "92[3]", "92_[1-3]", "92+0", "92.batch")),
        ("local", ("", "7", "local-", "local-7_3", "local-7[x]")),
    ],
)
def test_a_text_that_is_no_job_id_is_refused(scheduler: str, texts: Tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(UsageError):
            scheduler_named(scheduler).parse_job_id(text)
        assert read_job_id(scheduler, text) is None


@given(st.sampled_from(NAMES), st.integers(1, 10**9), st.integers(0, 999_999))
def test_a_sub_job_s_id_is_read_back(scheduler: str, number: int, index: int) -> None:
    own = scheduler_named(scheduler)
    job_id = f"local-{number}" if scheduler == "local" else str(number)
    read = own.parse_job_id(own.sub_job_id(job_id, index))
    assert (read.text, read.submitted, read.index) == (own.sub_job_id(job_id, index), job_id, index)


def test_sub_jobs_are_named_as_their_scheduler_names_them() -> None:
    def ids(scheduler: str, bulk: str, job_id: str = "9") -> List[str]:
        return sub_job_ids(SubmittedJob(scheduler, job_id, "", 1, 1, bulk, 0.0))

    assert ids("pjm", "0-1") == ["9[0]", "9[1]"]
    assert ids("slurm", "0-1") == ["9_0", "9_1"]
    assert ids("local", "3-4", "local-9") == ["local-9[3]", "local-9[4]"]
    assert ids("pjm", "") == ["9"] and ids("another", "") == ["9"]
    with pytest.raises(UsageError, match="'another': not known"):
        ids("another", "0-1")


@pytest.mark.parametrize("text", ["", "ok", "n=2", "11-21", "video", "2.2GHz"])
def test_ordinary_text_is_no_job_id(text: str) -> None:
    assert not is_job_id(text)


def test_a_scheduler_is_present_where_its_command_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [is_present(name) for name in NAMES] == [name == "local" for name in NAMES]
    for command in ("pjstat", "squeue"):
        (tmp_path / command).write_text("")
        (tmp_path / command).chmod(0o755)
    assert all(is_present(name) for name in NAMES)
