"""Tests of scripts that are of no run: submitted as they are, recorded, followed and ended by their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.by_id import NamedJob, poll_other_jobs, resolve_targets
from fugaku_gpt.jobs.plain_outcome import plain_cause
from fugaku_gpt.jobs.plain_script import is_plain_script, read_plain_script, submit_plain_script
from fugaku_gpt.jobs.poll import output_of, poll_runs
from fugaku_gpt.jobs.schedulers.protocol import Refused, Submission
from fugaku_gpt.jobs.submission import load_prepared
from fugaku_gpt.records.job import CANCELLED, ENDED, LOST, RUNNING, JobStatus, read_events, read_history
from tests.jobs.schedulers.fake import FakeScheduler

SCRIPT = "#!/bin/bash\r\n#PJM -L node=1\nmpiexec ./a.out\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin-of-nobody")
    Path("scripts").mkdir()
    Path("scripts/job.sh").write_bytes(SCRIPT.encode())
    return tmp_path


def submit(scheduler: FakeScheduler, record: str = "runs/one") -> str:
    return submit_plain_script(read_plain_script(Path("scripts/job.sh")), Path(record), scheduler)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("job.sh", "#!/bin/bash\n", True), ("job", "#PJM -L node=1\n", True), ("job.txt", "#SBATCH -N 1\n", True),
        ("run.yaml", "#!/bin/bash\n", False), ("notes.txt", "hello\n", False),
    ],
)  # fmt: skip
def test_a_script_is_distinguished_from_a_run_file(name: str, text: str, expected: bool) -> None:
    Path(name).write_text(text)
    assert is_plain_script(Path(name)) is expected
    assert not is_plain_script(Path("missing.sh")) and not is_plain_script(Path("scripts"))


def test_the_scheduler_follows_from_the_directives() -> None:
    assert read_plain_script(Path("scripts/job.sh")).scheduler == "pjm"
    assert read_plain_script(Path("scripts/job.sh"), "local").scheduler == "local"
    for text, problem in (("#!/bin/sh\n", "neither"), ("#PJM -L node=1\n#SBATCH -N 1\n", "#PJM and #SBATCH")):
        Path("x.sh").write_text(text)
        with pytest.raises(UsageError, match=f"x.sh: has {problem}.* --scheduler"):
            read_plain_script(Path("x.sh"))


def test_a_script_starts_in_the_present_folder_and_is_recorded(folder: Path) -> None:
    scheduler = FakeScheduler()
    assert submit(scheduler) == "101"
    (submission,) = scheduler.submitted
    assert (submission.script, submission.directory, submission.chain) == ("scripts/job.sh", folder, 1)
    assert Path("runs/one/job.sh").read_bytes() == SCRIPT.encode()
    (job,) = read_history(Path("runs/one")).jobs
    assert (job.job_id, job.tag, job.folder) == ("101", submission.tag, str(folder))
    with pytest.raises(UsageError, match="already holds a job"):
        submit(scheduler)
    with pytest.raises(UsageError, match="of no run; submit that script again"):
        load_prepared(Path("runs/one"))


def test_a_refused_script_leaves_the_reason() -> None:
    def refuse(submission: Submission) -> None:
        raise Refused("PJM 0057: too many nodes")

    with pytest.raises(Refused, match="too many nodes"):
        submit(FakeScheduler(refuse))
    assert read_history(Path("runs/one")).refused == "PJM 0057: too many nodes"


def test_a_killed_submission_keeps_the_output_folder(folder: Path) -> None:
    class Killed(FakeScheduler):
        def submit(self, submission: Submission) -> str:
            super().submit(submission)
            raise Uncertain("no answer")

    scheduler = Killed()
    with pytest.raises(Uncertain):
        submit(scheduler)
    (run,) = poll_runs([Path("runs/one")], lambda name: scheduler)
    assert (run.job_id, run.start_folder) == ("101", folder)
    assert [event.kind for event in read_events(Path("runs/one"))][:2] == ["intent", "submitted"]


def test_the_end_of_a_script_is_judged_by_the_exit_code(folder: Path) -> None:
    scheduler = FakeScheduler()
    submit(scheduler)
    output = folder / "job.sh.101.out"
    output.write_text("ValueError: nothing to do\n")
    scheduler.outputs = [output]
    scheduler.statuses["101"] = JobStatus("101", RUNNING)
    (run,) = poll_runs([Path("runs/one")], lambda name: scheduler)
    assert (run.outcome.state, run.outcome.status, run.is_over) == ("running", "", False)
    scheduler.statuses["101"] = JobStatus("101", ENDED, "EXT", 3, code=0)
    (run,) = poll_runs([Path("runs/one")], lambda name: scheduler)
    assert (run.outcome.status, run.outcome.cause) == ("failed", "exit code 3: ValueError: nothing to do")
    assert "resume" not in run.outcome.advice and output_of(run, lambda name: scheduler) == [output]


@pytest.mark.parametrize(
    ("status", "expected", "cause"),
    [
        (JobStatus("1", ENDED, "EXT", 0, code=0), "ok", ""),
        (JobStatus("1", ENDED, "EXT", 75, code=0), "failed", "exit code 75"),
        (JobStatus("1", ENDED, "EXT", None, 9), "failed", "signal 9"),
        (JobStatus("1", ENDED, "EXT", 0, 24, 11), "timeout", "time limit"),
        (JobStatus("1", CANCELLED, "CCL", code=1), "interrupted", "cancelled"),
        (JobStatus("1", LOST), "lost", "no longer knows"),
        (JobStatus("1", ENDED, "EXT"), "failed", "EXT, and no exit code says how"),
        (JobStatus("1", ENDED), "failed", "ended, and no exit code says how"),
        (JobStatus("1", ENDED, "EXT", 0, 9), "failed", "signal 9"),
    ],
)  # fmt: skip
def test_causes_of_scripts(status: JobStatus, expected: str, cause: str) -> None:
    result = plain_cause("pjm", status, lambda: [])
    assert result.status == expected and cause in result.cause and "resume" not in result.advice
    assert result.retry == "never"


def test_the_cause_of_a_script_has_what_it_printed_last() -> None:
    result = plain_cause("pjm", JobStatus("1", ENDED, "EXT", 3), lambda: ["a", "b", "c", "d"])
    assert result.cause == "exit code 3: b / c / d"
    lost = plain_cause("pjm", JobStatus("1", LOST, reason="the queue was stopped"), lambda: [])
    assert (lost.status, lost.cause) == ("lost", "the queue was stopped")


def resolve(target: str, scheduler: Optional[str] = None) -> NamedJob:
    directories, jobs = resolve_targets([Path(target)], Path("runs"), scheduler)
    assert directories == []
    return jobs[0]


def test_a_job_id_names_the_run_directory_that_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = FakeScheduler()
    submit(scheduler, "runs/one")
    submit(scheduler, "runs/sweep/two")
    assert resolve("102") == NamedJob("pjm", "102", Path("runs/sweep/two"))
    assert resolve("102[3]") == NamedJob("pjm", "102[3]", Path("runs/sweep/two"))
    assert resolve("7", "slurm") == NamedJob("slurm", "7")
    assert resolve("local-7") == NamedJob("local", "local-7")
    assert resolve_targets([Path("runs/one")], Path("runs")) == ([Path("runs/one")], [])
    assert resolve_targets([Path("no such folder")], Path("runs")) == ([Path("no such folder")], [])
    with pytest.raises(UsageError, match="no run directory has a job of this id, and no scheduler is on this machine"):
        resolve("7")
    Path("bin").mkdir()
    Path("bin/pjstat").write_text("")
    Path("bin/pjstat").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    assert resolve("7") == NamedJob("pjm", "7")


def test_a_job_without_a_record_is_looked_up_at_the_scheduler() -> None:
    scheduler = FakeScheduler()
    scheduler.statuses["9"] = JobStatus("9", ENDED, "EXT", 0, code=0)
    done, lost = poll_other_jobs([NamedJob("pjm", "9"), NamedJob("pjm", "8")], lambda name: scheduler)
    assert (done.outcome.status, lost.outcome.status, done.is_recorded) == ("ok", "lost", False)
    assert scheduler.polls == [["9", "8"]]
