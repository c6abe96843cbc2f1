"""Tests that the executor does as PSI/J promises, on a simulated PJM with real scripts, processes and faults.

They need an environment with PSI/J, this distribution and fugaku_gpt: ``make test-integrations``.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
from psij import (
    InvalidJobException,
    Job,
    JobAttributes,
    JobExecutor,
    JobSpec,
    JobState,
    JobStatus,
    ResourceSpecV1,
    SubmitException,
)
from psij_pjm.config import PjmExecutorConfig

from fugaku_gpt.simulator.session import Simulator
from fugaku_gpt.simulator.settings import Settings

HANG = timedelta(seconds=120)  # ends a test that would hang


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """A simulated PJM whose commands are on PATH."""
    before = os.environ["PATH"]
    with Simulator(tmp_path_factory.mktemp("sim"), Settings(min_elapse=1.0, grace=1.0, slots=4)) as simulator:
        os.environ["PATH"] = simulator.environment["PATH"]
        yield simulator
        os.environ["PATH"] = before


def new_executor(folder: Path, **settings: Any) -> JobExecutor:
    quick = {"queue_polling_interval": 0.2, "initial_queue_polling_delay": 0.1, "lost_seconds": 0.0}
    config = PjmExecutorConfig(work_directory=folder / "work", **{**quick, **settings})
    return JobExecutor.get_instance("pjm", config=config)


@pytest.fixture
def pjm(site: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobExecutor:
    monkeypatch.chdir(tmp_path)
    return new_executor(tmp_path)


def bash(command: str, folder: Path, **more: Any) -> Job:
    """A job that runs a command of bash, with its output in ``out`` and ``err`` of a folder."""
    attributes = JobAttributes(account="hp000000", custom_attributes={"pjm.x": "PJM_LLIO_GFSCACHE=/vol0004"})
    defaults = {"attributes": attributes, "directory": folder, "inherit_environment": False}
    paths = {"stdout_path": folder / "out", "stderr_path": folder / "err"}
    return Job(JobSpec("/bin/bash", ["-c", command], **{**defaults, **paths, **more}))


def end_of(job: Job) -> JobStatus:
    status = job.wait(timeout=HANG)
    assert status is not None, f"{job} does not end"
    return status


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def test_the_executor_and_the_launcher_are_there_by_their_descriptor() -> None:
    for first in ("psij", "psij_pjm.config", "psij_pjm.executor"):
        code = f"import {first}, psij; print(sorted(psij.JobExecutor.get_executor_names() & {{'pjm', 'slurm'}}))\n"
        code += "print(type(psij.Launcher.get_instance('pjm_mpiexec')).__name__, psij.JobExecutor.get_instance('pjm'))"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout == "['pjm', 'slurm']\nPjmMpiexecLauncher JobExecutor[pjm, 0.1.0]\n"


def test_callbacks_are_called_for_each_state_of_a_job(pjm: JobExecutor, tmp_path: Path) -> None:
    states: List[JobState] = []
    pjm.set_job_status_callback(lambda job, status: states.append(status.state))
    job = bash("echo hello; echo oops >&2; until test -e go; do sleep 0.05; done", tmp_path)
    pjm.submit(job)
    assert job.native_id is not None and job.status.state in (JobState.QUEUED, JobState.ACTIVE)
    assert job.native_id in pjm.list()
    assert job.wait(timeout=HANG, target_states=JobState.ACTIVE) is not None
    (tmp_path / "go").touch()
    status = end_of(job)
    assert (status.state, status.exit_code, status.message) == (JobState.COMPLETED, 0, None)
    assert states == [JobState.QUEUED, JobState.ACTIVE, JobState.COMPLETED]
    assert (tmp_path / "out").read_text() == "hello\n" and (tmp_path / "err").read_text() == "oops\n"
    assert job.native_id not in pjm.list()
    until(lambda: not [path for path in (tmp_path / "work" / "pjm").rglob("*") if path.is_file()])


def test_an_exit_code_other_than_0_fails_the_job(pjm: JobExecutor, tmp_path: Path) -> None:
    job = bash("exit 7", tmp_path)
    pjm.submit(job)
    status = end_of(job)
    assert (status.state, status.exit_code, status.message) == (JobState.FAILED, 7, "exit code 7")


def test_a_launcher_that_fails_says_why(pjm: JobExecutor, tmp_path: Path) -> None:
    (tmp_path / "before.sh").write_text("echo no such module >&2; exit 5\n")
    job = bash("true", tmp_path, pre_launch=tmp_path / "before.sh")
    pjm.submit(job)
    status = end_of(job)
    assert status.state == JobState.FAILED and status.exit_code == 5
    assert status.message is not None and "no such module" in status.message


def test_the_time_limit_of_a_job_is_named(pjm: JobExecutor, tmp_path: Path) -> None:
    attributes = JobAttributes(account="hp000000", duration=timedelta(seconds=1))
    job = bash("sleep 900", tmp_path, attributes=attributes)
    pjm.submit(job)
    status = end_of(job)
    assert status.state == JobState.FAILED and status.message is not None and "PJM code 11" in status.message


def test_a_cancelled_job_is_cancelled(pjm: JobExecutor, tmp_path: Path) -> None:
    job = bash("touch up; sleep 900", tmp_path)
    with pytest.raises(SubmitException):
        job.cancel()
    pjm.submit(job)
    until((tmp_path / "up").exists)
    job.cancel()
    assert end_of(job).state == JobState.CANCELED
    job.cancel()  # has ended: nothing to do


def test_environment_and_arguments_reach_the_job_as_they_are(
    pjm: JobExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    odd = "a 'b' \"c\" $HOME `d` \\ *"
    script = 'printf "%s\\n" "$ODD" "$1" "${INHERITED:-no}" "$NUMBER"; pwd'
    for inherits, seen in ((False, "no"), (True, "yes")):
        spec = {"inherit_environment": inherits, "environment": {"ODD": odd, "NUMBER": 3}}
        job = bash("", tmp_path, **spec)
        assert job.spec is not None
        job.spec.arguments = ["-c", script, "name", odd]
        pjm.submit(job)
        assert end_of(job).state == JobState.COMPLETED
        assert (tmp_path / "out").read_text().splitlines() == [odd, odd, seen, "3", str(tmp_path)]


def test_resources_and_attributes_reach_pjm(pjm: JobExecutor, tmp_path: Path) -> None:
    attributes = JobAttributes(
        duration=timedelta(minutes=90),
        queue_name="small",
        account="hp000000",
        custom_attributes={"pjm.L": "freq=2000,eco_state=0", "pjm.comment": "ours", "pjm.s": True, "slurm.qos": "x"},
    )
    resources = ResourceSpecV1(node_count=2, processes_per_node=2, memory=2**33)
    job = bash("env", tmp_path, attributes=attributes, resources=resources)
    pjm.submit(job)
    assert end_of(job).state == JobState.COMPLETED
    lines = set((tmp_path / "out").read_text().splitlines())
    expected = ("PJM_NODE=2", "PJM_MPI_PROC=4", "PJM_PROC_BY_NODE=2", "PJM_ELAPSE_LIMIT=5400", "PJM_RSCGRP=small")
    assert set(expected) <= lines and "PJM_NODE_MEM_LIMIT=4096Mi" in lines
    assert any(line.startswith("PJM_CUSTOM_RESOURCES=freq=2000,eco_state=0,") for line in lines)
    assert list(tmp_path.glob("*.stats"))


def test_ranks_are_started_by_mpiexec_and_their_output_is_put_together(pjm: JobExecutor, tmp_path: Path) -> None:
    job = bash(
        "echo rank $PMIX_RANK; echo note $PMIX_RANK >&2; test $PMIX_RANK -ne 2 || exit 4",
        tmp_path,
        resources=ResourceSpecV1(node_count=1, processes_per_node=12),
        launcher="pjm_mpiexec",
    )
    pjm.submit(job)
    status = end_of(job)
    assert (status.state, status.exit_code) == (JobState.FAILED, 4)
    assert sorted((tmp_path / "out").read_text().splitlines()) == sorted(f"rank {rank}" for rank in range(12))
    assert sorted((tmp_path / "err").read_text().splitlines()) == sorted(f"note {rank}" for rank in range(12))
    assert not list(tmp_path.glob(".ranks*"))


def test_lines_of_ranks_are_passed_on_while_these_run(pjm: JobExecutor, tmp_path: Path) -> None:
    pause = 'until test -e "$1"; do sleep 0.05; done'
    odd = "printf 'half of a line of %s' $PMIX_RANK"
    script = f"wait_for() {{ {pause}; }}; echo first $PMIX_RANK; {odd}; wait_for go; echo ', and its end'; {odd} >&2"
    job = bash(script, tmp_path, resources=ResourceSpecV1(node_count=1, processes_per_node=3), launcher="pjm_mpiexec")
    pjm.submit(job)
    out = tmp_path / "out"
    until(lambda: out.exists() and out.read_text().count("\n") == 3)
    assert sorted(out.read_text().splitlines()) == [f"first {rank}" for rank in range(3)]
    (tmp_path / "go").touch()
    assert end_of(job).state == JobState.COMPLETED
    ends = [f"half of a line of {rank}, and its end" for rank in range(3)]
    assert sorted(out.read_text().splitlines()) == [*(f"first {rank}" for rank in range(3)), *ends]
    assert (tmp_path / "err").read_text() == "".join(f"half of a line of {rank}" for rank in range(3))


def test_an_output_that_cannot_be_written_is_reported_before_ranks_start(pjm: JobExecutor, tmp_path: Path) -> None:
    job = bash("touch started", tmp_path, stdout_path=tmp_path / "missing" / "out", launcher="pjm_mpiexec")
    pjm.submit(job)
    status = end_of(job)
    assert status.state == JobState.FAILED and status.message is not None and "missing/out" in status.message
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "more, message",
    [
        ({"resources": ResourceSpecV1(gpu_cores_per_process=1)}, "no GPU"),
        ({"attributes": JobAttributes(account="g", reservation_id="r1")}, "no reservations"),
        ({"attributes": JobAttributes(account="g", custom_attributes={"pjm.L": "node=0"})}, "PJM.* error"),
        ({"attributes": JobAttributes(account='g"\n#PJM -L node=9')}, "cannot stand in a scheduler's line"),
        ({"environment": {"A=B; C": "1"}}, "not the name of a variable"),
    ],
)
def test_requests_that_pjm_cannot_meet_are_invalid_and_nothing_is_submitted(
    more: "dict[str, Any]", message: str, pjm: JobExecutor, tmp_path: Path
) -> None:
    job = bash("true", tmp_path, **more)
    with pytest.raises(InvalidJobException) as raised:
        pjm.submit(job)
    assert re.search(message, raised.value.message)
    assert job.native_id is None and job.status.state == JobState.NEW and not pjm.list()


def test_a_refused_job_can_be_submitted_again(pjm: JobExecutor, tmp_path: Path, site: Simulator) -> None:
    site.inject_fault("refuse", "71")
    job = bash("true", tmp_path)
    with pytest.raises(SubmitException) as raised:
        pjm.submit(job)
    assert "Group not authorized" in raised.value.message and job.status.state == JobState.NEW
    pjm.submit(job)
    assert end_of(job).state == JobState.COMPLETED


def test_a_job_that_pjm_may_have_accepted_has_failed_and_is_not_submitted_again(
    pjm: JobExecutor, tmp_path: Path, site: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tool_jobs", "schedulers.pjm"):
        monkeypatch.setattr(f"fugaku_gpt.jobs.{module}.RETRY_SECONDS", (0.1,))
    site.inject_fault("unanswered", "1")
    site.inject_fault("pjstat-fails", "100")
    job = bash("echo ran >> ran", tmp_path)
    pjm.submit(job)
    site.inject_fault("clear")
    assert job.status.state == JobState.FAILED and job.status.message is not None
    assert "comment fugaku-gpt-" in job.status.message
    with pytest.raises(InvalidJobException):
        pjm.submit(job)
    until((tmp_path / "ran").exists)  # it had been accepted
    assert (tmp_path / "ran").read_text() == "ran\n"


def test_another_process_can_attach_to_a_job(pjm: JobExecutor, tmp_path: Path) -> None:
    job = bash("until test -e go; do sleep 0.05; done; exit 3", tmp_path)
    pjm.submit(job)
    assert job.native_id is not None
    other, attached = new_executor(tmp_path), Job()
    other.attach(attached, job.native_id)
    assert attached.wait(timeout=HANG, target_states=JobState.ACTIVE) is not None
    (tmp_path / "go").touch()
    for each in (job, attached):
        assert (end_of(each).state, each.status.exit_code) == (JobState.FAILED, 3)
    with pytest.raises(InvalidJobException):
        other.attach(attached, job.native_id)
    with pytest.raises(InvalidJobException):
        other.attach(Job(), "local-3")


def test_failures_of_pjstat_change_no_state(pjm: JobExecutor, tmp_path: Path, site: Simulator) -> None:
    job = bash("until test -e go; do sleep 0.05; done", tmp_path)
    site.inject_fault("garbage", "2")
    site.inject_fault("pjstat-fails", "1")
    pjm.submit(job)
    assert job.wait(timeout=HANG, target_states=JobState.ACTIVE) is not None
    assert job.status.state == JobState.ACTIVE
    (tmp_path / "go").touch()
    assert end_of(job).state == JobState.COMPLETED


def test_a_job_that_pjm_has_lost_fails_after_a_while(pjm: JobExecutor, tmp_path: Path, site: Simulator) -> None:
    job = bash("touch up; sleep 900", tmp_path)
    pjm.submit(job)
    until((tmp_path / "up").exists)
    assert job.native_id is not None
    site.inject_fault("lose", job.native_id)
    status = end_of(job)
    assert status.state == JobState.FAILED and status.message is not None and "knows no job" in status.message


def test_many_jobs_are_followed_at_once(pjm: JobExecutor, tmp_path: Path) -> None:
    jobs = [bash(f"echo {number}", tmp_path, stdout_path=tmp_path / f"out{number}") for number in range(8)]
    for job in jobs:
        pjm.submit(job)
    assert [end_of(job).state for job in jobs] == [JobState.COMPLETED] * 8
    assert [(tmp_path / f"out{number}").read_text() for number in range(8)] == [f"{number}\n" for number in range(8)]


def test_a_job_whose_files_cannot_be_removed_has_ended_and_others_are_followed(
    pjm: JobExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = bash("until test -e go; do sleep 0.05; done", tmp_path), bash("true", tmp_path)
    pjm.submit(first)
    script = tmp_path / "work" / "pjm" / f"{first.id}.sh"
    script.unlink()
    script.mkdir()  # cannot be unlinked
    (tmp_path / "go").touch()
    assert end_of(first).state == JobState.COMPLETED
    pjm.submit(second)
    assert end_of(second).state == JobState.COMPLETED
    assert "its files are still there" in caplog.text


def test_an_error_of_one_job_does_not_end_the_thread_that_polls(
    pjm: JobExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [bash("true", tmp_path), bash("true", tmp_path)]
    executor: Any = pjm
    set_status = executor._set_status

    def fail_for_first(native_id: str, pjm_job: Any) -> None:
        if native_id == jobs[0].native_id:
            raise ZeroDivisionError
        set_status(native_id, pjm_job)

    monkeypatch.setattr(executor, "_set_status", fail_for_first)
    for job in jobs:
        pjm.submit(job)
    assert end_of(jobs[1]).state == JobState.COMPLETED
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(executor, "_set_status", set_status)
    assert end_of(jobs[0]).state == JobState.COMPLETED


def test_an_executor_that_nobody_uses_stops_polling(site: Simulator, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    executor = new_executor(tmp_path)
    (poller,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "queue of PJM"]
    assert poller.is_alive()
    del executor
    gc.collect()
    until(lambda: not poller.is_alive())
