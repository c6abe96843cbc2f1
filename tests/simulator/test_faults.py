"""Tests of injected faults, which a caller must tolerate."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Iterator

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.pjm.pjstat import parse_data, statuses_of
from fugaku_gpt.simulator import client
from fugaku_gpt.simulator.session import Simulator, simulator_status
from tests.simulator.conftest import GO, Write, alive
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_faults_left(site: Simulator) -> Iterator[None]:
    yield
    site.inject_fault("clear")


def test_refusals_with_any_code_and_then_no_more(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("true")
    site.inject_fault("refuse", "72", "2")
    for _ in range(2):
        done = site.run("pjsub", script, cwd=tmp_path)
        assert (done.returncode, done.stderr[:23]) == (1, "[ERR.] PJM 0072 pjsub T")
    assert site.run("pjsub", script, cwd=tmp_path).returncode == 0


def test_a_lost_job_is_unknown_to_every_command(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("echo $$ > pid; sleep 60")
    site.inject_fault("lose", "next")
    gone = site.submit(script, cwd=tmp_path)
    running = site.submit("-L", "elapse=1:00", script, cwd=tmp_path)
    until((tmp_path / "pid").exists)
    site.inject_fault("lose", running)
    for job_id in (gone, running):
        assert site.job_state(job_id) == ""
        assert "PJM 0112" in site.run("pjdel", job_id).stderr
    assert not alive(tmp_path / "pid")


def test_a_waiting_caller_is_not_left_waiting_for_a_lost_job(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("-L", "elapse=1:00", write("sleep 60"), cwd=tmp_path)
    root = str(site.spool.root)
    with client.connect(root) as waiting:
        waiting.settimeout(60)
        waiting.sendall((json.dumps(client.invocation_values("pjwait", [job_id])) + "\n").encode())
        assert site.job_state(job_id) == "RUN"  # the daemon reads in order, so it has read the request of that caller
        site.inject_fault("lose", job_id)
        assert json.loads(waiting.makefile().readline())["code"] == 1


def test_a_node_goes_down(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("echo start >> starts; touch up; sleep 60")
    job_id = site.submit("-L", "elapse=1:00", script, cwd=tmp_path)
    until((tmp_path / "up").exists)
    site.inject_fault("node-down", job_id)
    assert site.wait(job_id) == [[job_id, "20", "0", "0"]]
    (status_of,) = statuses_of(
        parse_data(site.run("pjstat", "-H", "--data", "--choose", "jid,st,pc,ermsg", job_id).stdout)
    ).values()
    assert (status_of.raw, status_of.code, status_of.reason) == ("EXT", 20, "NODE DOWN")


def test_a_restartable_job_runs_again_after_a_node_failure(site: Simulator, write: Write, tmp_path: Path) -> None:
    site.inject_fault("node-down", "next")
    job_id = site.submit("-s", "--restart", "-L", "elapse=1:00", write(GO), cwd=tmp_path)
    (tmp_path / "go").touch()  # the node was gone before pjsub had its answer: this is for the second start
    assert site.wait(job_id) == [[job_id, "0", "0", "0"]]
    assert " RETRY NUM                 : 1\n" in (tmp_path / f"job.sh.{job_id}.stats").read_text()


def test_an_answer_that_gets_lost_leaves_a_job(site: Simulator, write: Write, tmp_path: Path) -> None:
    site.inject_fault("unanswered")
    done = site.run("pjsub", "-z", "jid", "--comment", "tag-17", write("true"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("[ERR.] PJM 0091 pjsub ")
    rows = site.run("pjstat", "-s", "--data", "--choose", "jid,cmt").stdout
    rows += site.run("pjstat", "-H", "-s", "--data", "--choose", "jid,cmt").stdout
    assert ",tag-17\n" in rows


def test_pjstat_fails_is_slow_or_prints_nonsense(site: Simulator) -> None:
    site.inject_fault("pjstat-fails", "1")
    assert site.run("pjstat").returncode == 1
    assert site.run("pjstat").returncode == 0
    site.inject_fault("garbage")
    garbage = site.run("pjstat", "--data").stdout
    assert garbage and parse_data(garbage) == []
    site.inject_fault("slow-pjstat", "0.5")
    begun = time.monotonic()
    assert site.run("pjstat").returncode == 0
    assert time.monotonic() - begun >= 0.5  # not a measurement: it cannot be sooner
    assert "slow-pjstat 0.5" in simulator_status(site.spool)["faults"]
    site.inject_fault("clear")
    assert simulator_status(site.spool)["faults"] == ""


@pytest.mark.parametrize(
    "fault_arguments", [["explode"], ["lose"], ["lose", "999999"], ["refuse", "x"], ["slow-pjstat"]]
)
def test_invalid_faults_are_refused_with_the_valid_names(site: Simulator, fault_arguments: "list[str]") -> None:
    with pytest.raises(UsageError, match="valid are: refuse"):
        site.inject_fault(*fault_arguments)


def test_no_running_job_for_a_node_to_fail(site: Simulator) -> None:
    with pytest.raises(UsageError, match="no running job"):
        site.inject_fault("node-down")


def test_a_node_takes_its_ranks_with_it_and_pjm_ends_the_job_later(
    site: Simulator, write: Write, tmp_path: Path
) -> None:
    rank = "echo $PMIX_RANK; echo $$ > pid-$PMIX_RANK; trap '' TERM; sleep 900"
    (tmp_path / "rank.sh").write_text(rank, encoding="utf-8")
    script = write("mpiexec -n 4 bash rank.sh; echo $? > code; sleep 900")
    job_id = site.submit("-L", "node=2,elapse=1:00:00", "--mpi", "max-proc-per-node=2", script, cwd=tmp_path)
    pids = [tmp_path / f"pid-{rank}" for rank in range(4)]
    until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
    with pytest.raises(UsageError, match="has nodes 0 to 1, and no node 2"):
        site.inject_fault("node-down", job_id, "2")
    site.inject_fault("node-down", job_id, "1", "600")
    until(lambda: not alive(pids[2]) and not alive(pids[3]))
    until((tmp_path / "code").exists)  # the launcher has noticed, and the script continues
    assert (tmp_path / "code").read_text().strip() != "0" and site.job_state(job_id) == "RUN"
    site.inject_fault("node-down", job_id, "0")
    assert site.wait(job_id) == [[job_id, "20", "0", "0"]]


@pytest.mark.parametrize("arguments", [("node-down", "JOB", "x"), ("node-down", "JOB", "0", "-1")])
def test_a_malformed_death_of_a_node_is_refused(
    site: Simulator, write: Write, tmp_path: Path, arguments: "tuple[str, ...]"
) -> None:
    job_id = site.submit("-L", "elapse=1:00", write("sleep 60"), cwd=tmp_path)
    with pytest.raises(UsageError, match="not a fault"):
        site.inject_fault(*[job_id if word == "JOB" else word for word in arguments])
