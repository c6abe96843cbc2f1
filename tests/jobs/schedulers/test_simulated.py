"""Tests of the PJM scheduler with the simulator: real scripts, PJM's message formats and injected faults."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.jobs.outcome import Outcome
from fugaku_gpt.jobs.poll import watch_runs
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.schedulers.protocol import Refused, Submission
from fugaku_gpt.jobs.submission import submit
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.job import CANCELLED, ENDED, LOST, ON_HOLD, OVER, RUNNING, UNKNOWN
from fugaku_gpt.simulator.session import Simulator
from tests.support.simulated import simulated
from tests.support.waiting import until_state

pytestmark = pytest.mark.slow

RECORD = """
end() {
  mkdir -p exit
  printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "", "started": 1, "ended": 2, ' \\
    "$PJM_JOBID" "$PJM_SUBJOBID" "$1" > "exit/.$PJM_SUBJOBID.tmp"
  echo '"host": "x"}' >> "exit/.$PJM_SUBJOBID.tmp"
  mv "exit/.$PJM_SUBJOBID.tmp" "exit/$PJM_SUBJOBID.json"
  exit "$1"
}
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Simulator]:
    before = os.environ["PATH"]
    with simulated() as simulator:
        os.environ["PATH"] = simulator.environment["PATH"]
        yield simulator
        os.environ["PATH"] = before


@pytest.fixture
def pjm(site: Simulator) -> Iterator[PjmScheduler]:
    yield PjmScheduler(sleep=lambda seconds: time.sleep(seconds / 20))
    site.inject_fault("clear")


def write(directory: Path, body: str, *directives: str, **more: Any) -> Submission:
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"#PJM {line}\n" for line in ("-N gpt", '-L "node=1,elapse=60"', *directives))
    (directory / "job.sh").write_text(f"#!/bin/bash\n{lines}{RECORD}{body}\n", encoding="utf-8")
    return Submission("job.sh", directory, "gpt", **more)


def follow(pjm: PjmScheduler, directory: Path, *settings: str) -> Outcome:
    """Submit a directory with a script as a run, and poll it until it ends."""
    config = load_run_config(preset="tiny", overrides=["job.scheduler=pjm", *settings])
    (directory / "config.yaml").write_text(dump_run_config(config), encoding="utf-8")
    submit(directory, pjm)
    (directory / "go").touch()
    *_, (last,) = watch_runs([directory], lambda name: pjm, sleep=lambda seconds: time.sleep(min(seconds, 0.2)))
    return last.outcome


def test_a_finished_job_reports_all_exit_codes(pjm: PjmScheduler, tmp_path: Path) -> None:
    job_id = pjm.submit(write(tmp_path, "echo hello; exit 3", tag="t-1"))
    status = until_state(pjm, job_id, *OVER)
    assert (status.state, status.raw, status.exit_code, status.signal, status.code) == (ENDED, "EXT", 3, None, 0)
    (output, *_) = pjm.output_files(tmp_path, job_id)
    assert output.name == f"gpt.{job_id}.out" and "hello" in output.read_text(encoding="utf-8")
    assert pjm.find(["t-1", "t-none"]) == {"t-1": job_id}


def test_the_elapse_limit_is_reported_as_a_timeout(pjm: PjmScheduler, tmp_path: Path) -> None:
    write(tmp_path, "sleep 900", '-L "elapse=1"')
    outcome = follow(pjm, tmp_path)
    assert (outcome.status, outcome.retry) == (runs.TIMEOUT, "resume") and "PJM code 11" in outcome.cause
    recorded_result = runs.RunDirectory(tmp_path).result()
    assert recorded_result is not None and (recorded_result.status, recorded_result.judged) == (runs.TIMEOUT, True)


def test_a_job_whose_node_goes_down_is_to_be_retried(site: Simulator, pjm: PjmScheduler, tmp_path: Path) -> None:
    site.inject_fault("node-down", "next")
    write(tmp_path, "sleep 900")
    outcome = follow(pjm, tmp_path)
    assert (outcome.status, outcome.retry) == (runs.FAILED, "retry") and "node down" in outcome.cause


def test_a_lost_job_is_lost(site: Simulator, pjm: PjmScheduler, tmp_path: Path) -> None:
    site.inject_fault("lose", "next")
    write(tmp_path, "true")
    outcome = follow(pjm, tmp_path)
    assert (outcome.status, outcome.state, outcome.retry) == (runs.LOST, LOST, "retry")


def test_jobs_are_put_on_hold_released_and_deleted(site: Simulator, pjm: PjmScheduler, tmp_path: Path) -> None:
    running = pjm.submit(write(tmp_path / "running", "sleep 900"))
    until_state(pjm, running, RUNNING)
    assert pjm.cancel([running, "999999"])[running] == ""
    status = until_state(pjm, running, *OVER)
    assert (status.state, status.code) == (CANCELLED, 1)
    assert "does not exist" in pjm.cancel(["999999"])["999999"]
    waiting = [pjm.submit(write(tmp_path / str(number), "sleep 900")) for number in range(5)]  # four run at once
    assert pjm.hold(waiting[-1:]) == {waiting[-1]: ""}
    assert until_state(pjm, waiting[-1], ON_HOLD).raw == "HLD"
    assert pjm.release(waiting[-1:]) == {waiting[-1]: ""}
    assert pjm.poll(waiting)[waiting[-1]].state != ON_HOLD
    assert set(pjm.cancel(waiting).values()) == {""}


def test_a_bulk_job_is_reported_from_the_sub_jobs(pjm: PjmScheduler, tmp_path: Path) -> None:
    job_id = pjm.submit(write(tmp_path, "exit $PJM_BULKNUM", "--bulk", '--sparam "0-2"'))
    assert "[" not in job_id
    status = until_state(pjm, job_id, *OVER)
    assert (status.state, status.exit_code) == (ENDED, 1)
    assert pjm.poll([f"{job_id}[2]"])[f"{job_id}[2]"].exit_code == 2
    assert len([path for path in pjm.output_files(tmp_path, job_id) if path.suffix == ".out"]) == 3


@pytest.mark.parametrize(("code", "ran"), [(75, True), (1, False), (2, False)])
def test_a_link_is_cancelled_after_a_link_that_has_failed(
    pjm: PjmScheduler, tmp_path: Path, code: int, ran: bool
) -> None:
    write(
        tmp_path,
        f"touch ran-$PJM_STEPNUM; until [[ -e go ]]; do sleep 0.1; done; ((PJM_STEPNUM > 0)) || end {code}; end 1",
    )
    outcome = follow(pjm, tmp_path, "job.chain=3")
    assert (tmp_path / "ran-0").exists() and (tmp_path / "ran-1").exists() is ran
    assert not (tmp_path / "ran-2").exists()
    assert outcome.status == (runs.REFUSED if code == 2 else runs.FAILED)
    assert f"exit code {1 if ran else code}" in outcome.cause


def test_a_link_starts_after_a_link_whose_node_has_died(site: Simulator, pjm: PjmScheduler, tmp_path: Path) -> None:
    body = "touch ran-$PJM_STEPNUM; ((PJM_STEPNUM > 0)) || sleep 900; end 76"
    first = pjm.submit(write(tmp_path, body, chain=3))
    second = pjm.submit(write(tmp_path, body, chain=3, link=2, after=first))
    third = pjm.submit(write(tmp_path, body, chain=3, link=3, after=second))
    until_state(pjm, first, RUNNING)
    site.inject_fault("node-down", first)
    status = until_state(pjm, third, *OVER)
    assert (status.state, status.code) == (CANCELLED, 6) and not (tmp_path / "ran-2").exists()
    statuses = pjm.poll([first, second])
    assert (statuses[first].code, statuses[second].code, statuses[second].exit_code) == (20, 0, 76)


def test_a_temporary_refusal_is_retried(site: Simulator, pjm: PjmScheduler, tmp_path: Path) -> None:
    site.inject_fault("refuse", "72", "2")
    job_id = pjm.submit(write(tmp_path, "true"))
    assert until_state(pjm, job_id, *OVER).exit_code == 0
    site.inject_fault("refuse", "71", "1")
    with pytest.raises(Refused, match="PJM 0071"):
        pjm.submit(write(tmp_path, "true"))


def test_a_job_accepted_despite_an_error_is_not_submitted_twice(
    site: Simulator, pjm: PjmScheduler, tmp_path: Path
) -> None:
    site.inject_fault("unanswered")
    job_id = pjm.submit(write(tmp_path, "echo ran >> ran", tag="t-unanswered"))
    assert until_state(pjm, job_id, *OVER).exit_code == 0
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "ran\n"


def test_pjstat_may_fail_and_print_garbage(site: Simulator, pjm: PjmScheduler, tmp_path: Path) -> None:
    job_id = pjm.submit(write(tmp_path, "sleep 900"))
    until_state(pjm, job_id, RUNNING)
    site.inject_fault("pjstat-fails", "2")
    assert pjm.poll([job_id])[job_id].state == RUNNING
    site.inject_fault("garbage")
    assert pjm.poll([job_id])[job_id].state == RUNNING
    site.inject_fault("pjstat-fails", "4")
    assert pjm.poll([job_id])[job_id].state == UNKNOWN
    assert pjm.cancel([job_id]) == {job_id: ""}
