"""Tests of the daemon: one per folder, it survives its starter, and a kill loses only the running jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.simulator.session import (
    Simulator,
    find_spool,
    send_order,
    simulator_status,
    start_simulator,
    stop_simulator,
)
from fugaku_gpt.simulator.settings import Settings, read_settings
from fugaku_gpt.simulator.spool import Spool
from tests.simulator.conftest import Write, alive
from tests.support.simulated import QUICK, simulated
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_stop_ends_every_job_and_the_daemon(tmp_path: Path, write: Write) -> None:
    write("trap '' TERM; echo $$ > pid; setsid sleep 300 & echo $! > other; sleep 300")
    with simulated(tmp_path / "sim", grace=0.3) as site:
        running = site.submit("-L", "elapse=1:00:00", "job.sh", cwd=tmp_path)
        waiting = site.submit("--at", "20991231", "job.sh", cwd=tmp_path)
        until((tmp_path / "other").exists)
        pid = site.daemon_pid()
        assert pid is not None
        site.stop()
        assert site.daemon_pid() is None and not psutil.pid_exists(pid)
        assert not alive(tmp_path / "pid") and not alive(tmp_path / "other")
        refused = site.run("pjstat")
        assert (refused.returncode, refused.stderr[:23]) == (1, "[ERR.] PJM 0290 pjstat ")
        site.start()
        assert [site.job_state(job_id) for job_id in (running, waiting)] == ["CCL", "CCL"]


def test_a_killed_daemon_loses_only_the_running_jobs(tmp_path: Path, write: Write) -> None:
    write("echo $$ > pid.$PJM_JOBID; echo start >> starts; sleep 300")
    with simulated(tmp_path / "sim", slots=2) as site:
        over = site.submit("--at", "20991231", "job.sh", cwd=tmp_path)
        site.run("pjdel", over)
        running = site.submit("-s", "-L", "elapse=1:00:00", "job.sh", cwd=tmp_path)
        again = site.submit("--restart", "-L", "elapse=1:00:00", "job.sh", cwd=tmp_path)
        waiting = site.submit("-L", "elapse=1:00:00", "job.sh", cwd=tmp_path)
        bulk = site.submit("--bulk", "--sparam", "0-1", "--at", "20991231", "job.sh", cwd=tmp_path)
        until(lambda: len(list(tmp_path.glob("pid.*"))) == 2)
        pid = site.daemon_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: site.daemon_pid() is None)
        assert alive(tmp_path / f"pid.{running}")  # nobody has ended it yet
        site.start()
        assert not alive(tmp_path / f"pid.{running}")
        assert site.job_state(over) == "CCL" and site.job_state(bulk) == "QUE"
        assert site.wait(running) == [[running, "20", "0", "0"]]
        assert " PJM CODE                  : 20\n" in (tmp_path / f"job.sh.{running}.stats").read_text()
        until(lambda: {site.job_state(job_id) for job_id in (again, waiting)} == {"RUN"})
        assert int(site.submit("--at", "20991231", "job.sh", cwd=tmp_path)) > int(bulk)


def test_stop_ends_the_processes_of_a_killed_daemon(tmp_path: Path, write: Write) -> None:
    write("echo $$ > pid; sleep 300")
    spool = start_simulator(tmp_path / "sim", Settings(**QUICK))
    subprocess.run([str(spool.bin / "pjsub"), "job.sh"], cwd=tmp_path, check=True, capture_output=True)
    until((tmp_path / "pid").exists)
    pid = spool.daemon_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: spool.daemon_pid() is None)
    stop_simulator(spool)
    assert not alive(tmp_path / "pid")
    with pytest.raises(UsageError, match="no simulator runs"):
        stop_simulator(spool)


def test_a_process_with_the_reused_id_of_a_job_is_not_ended(tmp_path: Path, write: Write) -> None:
    write("true")
    with simulated(tmp_path / "sim") as site:
        job_id = site.submit("--at", "20991231", "job.sh", cwd=tmp_path)
        site.stop()
        innocent = subprocess.Popen(["sleep", "300"], start_new_session=True)
        try:
            record = json.loads(site.spool.record_path(job_id).read_text())
            record.update(state="RUN", pid=innocent.pid, started=True)  # as a power cut leaves it
            record["dates"].update(RUN=record["dates"]["accept"])
            site.spool.record_path(job_id).write_text(json.dumps(record))
            site.start()
            assert site.wait(job_id) == [[job_id, "20", "0", "0"]]
            assert innocent.poll() is None
        finally:
            innocent.kill()
            innocent.wait()


def test_another_users_folder_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(tmp_path / "sim") as site:
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        with pytest.raises(UsageError, match="another user"):
            find_spool(tmp_path / "sim")
        with pytest.raises(UsageError, match="another user"):
            start_simulator(tmp_path / "sim")
        monkeypatch.undo()
        assert find_spool(tmp_path / "sim") == site.spool
    assert find_spool(tmp_path / "none").daemon_pid() is None


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        start_simulator(tmp_path / "file" / "sim")


def test_a_spool_left_half_written_by_a_kill_is_read(tmp_path: Path, write: Write) -> None:
    write("true")
    with simulated(tmp_path / "sim") as site:
        job_id = site.submit("job.sh", cwd=tmp_path)
        site.wait(job_id)
        bulk = site.submit("--bulk", "--sparam", "0-1", "--at", "20991231", "job.sh", cwd=tmp_path)
        site.stop()
        (site.spool.jobs / f".{job_id}.json.tmp").write_text('{"half')
        site.spool.record_path(bulk).unlink()  # a bulk job's own record is written after those of its sub-jobs
        site.start()
        assert site.job_state(job_id) == "EXT"
        assert site.job_state(bulk) == ""
        assert sorted(path.name for path in site.spool.jobs.glob("*")) == [job_id, f"{job_id}.json"]


def test_a_second_simulator_in_a_folder_is_refused(tmp_path: Path) -> None:
    with simulated(tmp_path / "sim") as site:
        with pytest.raises(UsageError, match="runs there already"):
            site.start()
        other = subprocess.run([sys.executable, str(site.spool.lib / "daemon.py")], capture_output=True, text=True)
        assert other.returncode == 1 and "runs there already" in other.stderr
        assert site.run("pjstat").returncode == 0


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="something else"):
        start_simulator(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="no simulator runs"):
        stop_simulator(Spool(tmp_path / "none"))


def test_only_the_owner_may_enter(tmp_path: Path) -> None:
    with simulated(tmp_path / "sim") as site:
        assert site.spool.root.stat().st_mode & 0o777 == 0o700
        assert site.spool.socket.stat().st_mode & 0o177 == 0


def test_the_daemon_outlives_the_starter_and_keeps_the_settings(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fugaku_gpt.simulator.session import start_simulator;"
        "from fugaku_gpt.simulator.settings import Settings; start_simulator(Path(sys.argv[1]), Settings(nodes=77))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "sim")], check=True)
    spool = Spool(tmp_path / "sim")
    try:
        assert simulator_status(spool) == {"jobs": {}, "faults": ""}
        assert read_settings(spool.settings).nodes == 77
    finally:
        stop_simulator(spool)
    assert not spool.socket.exists()


def test_a_simulator_of_a_with_block_ends_with_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.support.simulated import simulated\n"
        "with simulated(Path(sys.argv[1])) as site:\n"
        "    (Path(sys.argv[2]) / 'job.sh').write_text('echo $$ > pid; sleep 300')\n"
        "    site.submit('-L', 'elapse=1:00:00', 'job.sh', cwd=Path(sys.argv[2])); sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "sim"), str(tmp_path)], stdin=subprocess.PIPE
    )
    until((tmp_path / "pid").exists)
    starter.kill()
    starter.wait()
    assert starter.stdin is not None
    starter.stdin.close()
    until(lambda: Spool(tmp_path / "sim").daemon_pid() is None)
    assert not alive(tmp_path / "pid")


def test_the_daemon_ends_when_the_folder_is_removed(tmp_path: Path, write: Write) -> None:
    import shutil

    write("echo $$ > pid; sleep 300")
    spool = start_simulator(tmp_path / "sim", Settings(**QUICK))
    pid = spool.daemon_pid()
    assert pid is not None
    subprocess.run([str(spool.bin / "pjsub"), "job.sh"], cwd=tmp_path, check=True, capture_output=True)
    until((tmp_path / "pid").exists)
    shutil.rmtree(spool.root)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)  # its starter, this test, has not reaped it
    assert not alive(tmp_path / "pid")


def test_a_long_path_of_the_folder_is_no_hindrance(tmp_path: Path, write: Write) -> None:
    write("true")
    deep = tmp_path / ("a folder with 'quotes' & spaces " * 3) / ("x" * 100)
    with simulated(deep) as site:
        job_id = site.submit("job.sh", cwd=tmp_path)
        assert site.wait(job_id) == [[job_id, "0", "0", "0"]]


def test_nonsense_on_the_socket_does_not_end_the_daemon(tmp_path: Path) -> None:
    from fugaku_gpt.simulator.client import connect, send_request

    with simulated(tmp_path / "sim") as site:
        answer = send_request(str(site.spool.root), {"nonsense": 1})
        assert answer["code"] == 1 and "internal error" in answer["err"]
        with connect(str(site.spool.root)) as connection:
            connection.sendall(b"half a line")
        with connect(str(site.spool.root)) as connection:
            connection.sendall(b"\xff\xfe no json\n")
            assert json.loads(connection.makefile().readline())["code"] == 1
        assert simulator_status(site.spool) == {"jobs": {}, "faults": ""}
        with pytest.raises(UsageError):
            send_order(site.spool, ["nothing"])


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="nodes: 0: must be positive"):
        Settings(nodes=0)
    with pytest.raises(UsageError, match="grace: -1"):
        Settings(grace=-1)


def test_hundreds_of_sub_jobs(tmp_path: Path, write: Write) -> None:
    write("true")
    with simulated(tmp_path / "sim") as site:
        bulk = site.submit("--bulk", "--sparam", "0-299", "--at", "20991231", "job.sh", cwd=tmp_path)
        rows = site.run("pjstat", "-E", "--data", "--choose", "jid", bulk).stdout.splitlines()
        assert len(rows) == 302
        assert site.run("pjdel", bulk).stdout == f"[INFO] PJM 0100 pjdel Accepted job {bulk}.\n"
        assert site.job_state(bulk) == "CCL"


def test_the_context_manager_removes_a_temporary_folder() -> None:
    with Simulator(settings=Settings(**QUICK)) as site:
        folder = site.directory
        assert site.run("pjstat").returncode == 0
    assert not folder.exists()
