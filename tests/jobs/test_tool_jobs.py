"""Tests of jobs of other tools on PJM: their scripts, and how they end on a simulated PJM, with faults on request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, List, Tuple

import pytest

from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandResult, CommandTimeout, run_command
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.schedulers.protocol import Refused
from fugaku_gpt.jobs.tool_jobs import JobEnd, PolledJob, ToolJobs, ToolScript, job_name
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.simulator.session import Simulator
from tests.support.simulated import simulated_pjm  # noqa: F401
from tests.support.waiting import until

OPTIONS = (("-g", "hp000000"), ("-L", "node=1"), ("-L", "elapse=0:10:00"), ("-x", "PJM_LLIO_GFSCACHE=/vol0004"))
GO = "until test -e go; do sleep 0.05; done"


def quickly(seconds: float) -> None:
    time.sleep(seconds / 20)


@pytest.fixture
def jobs(tmp_path: Path, simulated_pjm: Simulator) -> ToolJobs:  # noqa: F811
    return ToolJobs(tmp_path / "tool", PjmScheduler(sleep=quickly), lost_seconds=0.0, sleep=quickly)


def submitted(jobs: ToolJobs, *commands: str, options: Tuple[Tuple[str, str], ...] = OPTIONS) -> str:
    """Submit a job with these commands, which starts in the folder above that of the tool."""
    path = jobs.folder / "a.sh"
    jobs.write(ToolScript("a", options, commands, ("-o a.out -j",)), path)
    return jobs.submit(path, jobs.folder.parent, "a")


def end_of(jobs: ToolJobs, job_id: str) -> JobEnd:
    """Poll a job until it has ended."""

    def poll() -> "JobEnd | None":
        return jobs.poll([job_id], {job_id: jobs.folder.parent / "a.out"})[job_id].end

    end = until(poll, pause=0.1)
    assert end is not None
    return end


def test_a_script_is_read_by_pjsub_as_it_was_meant(tmp_path: Path) -> None:
    options = (*OPTIONS, ("--mpi", "proc=4"), ("-j", ""))
    script = ToolScript("align", options, ["echo 'a b'"], ["-L freq=2000,eco_state=0 -s"]).text(
        tmp_path / "it's a folder"
    )
    read = read_script(script)
    assert read.options["resources"] == {"node": "1", "elapse": "0:10:00", "freq": "2000", "eco_state": "0"}
    assert (read.options["name"], read.options["group"]) == ("align", "hp000000")
    assert read.options["mpi"] == {"proc": "4"} and not read.problems and not read.ignored_lines
    assert {"join", "stats"} <= set(read.options)
    assert script.endswith("\necho 'a b'\n")


@pytest.mark.parametrize(
    "options, directives, message",
    [
        ((("-x", "A=$(rm -r ~)"),), (), "cannot stand in a scheduler's line"),
        ((("-g", 'hp"\n#PJM -L node=384'),), (), "cannot stand in a scheduler's line"),
        ((), ("-L node=2\ntouch gone",), "must be on one line"),
    ],
)
def test_an_option_cannot_become_another_line_or_a_command(
    options: Tuple[Tuple[str, str], ...], directives: Tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        ToolScript("a", options, [], directives).text(tmp_path)


@pytest.mark.parametrize(
    "text, name",
    [
        ("snakejob.align.3.sh", "snakejob.align.3.sh"),
        ("7 zip/é", "job_7_zip"),
        ("/bin/date", "bin_date"),
        ("", "job"),
        ("a" * 90, "a" * 63),
    ],
)
def test_any_text_becomes_a_name_that_pjm_accepts(text: str, name: str) -> None:
    assert job_name(text) == name


def test_a_script_that_pjm_would_refuse_is_not_written(tmp_path: Path) -> None:
    jobs, script = ToolJobs(tmp_path), ToolScript("a", (*OPTIONS, ("-L", "node=0")), ["date"])
    with pytest.raises(UsageError, match=r"a\.sh:\d+: PJM\d+ error"):
        jobs.write(script, tmp_path / "a.sh")
    assert not list(tmp_path.iterdir())
    assert jobs.write(script, tmp_path / "a.sh", is_linted=False) == []


@pytest.mark.slow
def test_the_exit_code_of_the_commands_is_that_of_the_job(jobs: ToolJobs) -> None:
    assert end_of(jobs, submitted(jobs, "cd /", "true")) == JobEnd(True, exit_code=0)
    failed = end_of(jobs, submitted(jobs, "echo 'ValueError: no rows'", "exit 3"))
    assert failed == JobEnd(False, exit_code=3, reason="exit code 3: ValueError: no rows")
    assert sorted(path.name for path in (jobs.folder / "exit").iterdir()) == ["1.json", "2.json"]
    jobs.forget("1")
    jobs.forget("1")
    assert [path.name for path in (jobs.folder / "exit").iterdir()] == ["2.json"]


@pytest.mark.slow
def test_the_time_limit_and_a_cancellation_are_told_apart(jobs: ToolJobs) -> None:
    late = end_of(jobs, submitted(jobs, "sleep 900", options=(*OPTIONS, ("-L", "elapse=1"))))
    assert not late.is_success and not late.is_cancelled and "PJM code 11" in late.reason
    job_id = submitted(jobs, "touch up", "sleep 900")
    until((jobs.folder.parent / "up").exists)
    assert jobs.present_jobs() == [job_id]
    assert jobs.cancel([job_id]) == {}
    assert end_of(jobs, job_id).is_cancelled
    assert jobs.cancel([job_id]) == {}  # is gone: nothing runs
    assert jobs.present_jobs() == []


@pytest.mark.slow
def test_no_failure_of_pjstat_ends_a_job(jobs: ToolJobs, simulated_pjm: Simulator) -> None:  # noqa: F811
    job_id = submitted(jobs, GO)
    for fault in ("pjstat-fails", "garbage"):
        simulated_pjm.inject_fault(fault, "4")  # a query is repeated three times
        polled = jobs.poll([job_id])[job_id]
        assert (polled.status.state, polled.end) == ("unknown", None)
    assert jobs.poll([job_id])[job_id] == PolledJob(jobs.scheduler.poll([job_id])[job_id])
    (jobs.folder.parent / "go").touch()
    assert end_of(jobs, job_id).is_success


@pytest.mark.slow
def test_the_record_of_a_lost_job_decides_and_without_one_it_is_lost_after_a_while(
    jobs: ToolJobs,
    simulated_pjm: Simulator,  # noqa: F811
) -> None:
    recorded = submitted(jobs, "exit 4")
    until((jobs.folder / "exit" / f"{recorded}.json").exists)
    simulated_pjm.inject_fault("lose", recorded)
    assert end_of(jobs, recorded) == JobEnd(False, exit_code=4, reason="exit code 4")

    lost, now = submitted(jobs, GO), [0.0]
    simulated_pjm.inject_fault("lose", lost)
    patient = ToolJobs(jobs.folder, jobs.scheduler, lost_seconds=300.0, clock=lambda: now[0])
    ends: List["JobEnd | None"] = []
    for now[0] in (0.0, 299.0, 300.0):
        ends.append(patient.poll([lost])[lost].end)
    assert ends[:2] == [None, None]
    end = ends[2]
    assert end is not None and not end.is_success and "knows no job" in end.reason
    (jobs.folder.parent / "go").touch()


@pytest.mark.slow
@pytest.mark.usefixtures("simulated_pjm")
def test_a_damaged_record_of_one_job_leaves_the_answer_to_the_scheduler(jobs: ToolJobs) -> None:
    job_id = submitted(jobs, "exit 4")
    record = jobs.folder / "exit" / f"{job_id}.json"
    until(record.exists)
    record.write_text("")
    end = end_of(jobs, job_id)
    assert not end.is_success and end.exit_code == 4


@pytest.mark.slow
def test_a_submission_without_an_answer_is_recognised_by_its_comment(
    jobs: ToolJobs,
    simulated_pjm: Simulator,  # noqa: F811
) -> None:
    def hang_after(command: str) -> Callable[..., CommandResult]:
        def run(argv: List[str], **options: object) -> CommandResult:
            answer = run_command(argv, **options)  # type: ignore[arg-type]
            if argv[0] == command:
                raise CommandTimeout(f"{command}: no answer")
            return answer

        return run

    hanging = ToolJobs(jobs.folder, PjmScheduler(hang_after("pjsub"), quickly), sleep=quickly)
    job_id = submitted(hanging, "true")
    assert end_of(jobs, job_id).is_success and job_id == "1"
    with pytest.raises(Uncertain, match=r"look for a job with the comment fugaku-gpt-[0-9a-f]{32}: pjstat"):
        submitted(ToolJobs(jobs.folder, PjmScheduler(lambda *_, **__: hang(), quickly), sleep=quickly), "true")
    simulated_pjm.inject_fault("refuse", "71")
    with pytest.raises(Refused, match="Group not authorized"):
        submitted(jobs, "true")


def hang() -> CommandResult:
    raise CommandTimeout("no answer within 60 s")
