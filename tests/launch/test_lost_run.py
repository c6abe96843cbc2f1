"""Tests of runs whose launcher and ranks were killed together, so that none has recorded how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import List

import psutil
import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.launch.lost_run import conclude_lost_run, conclude_lost_runs
from fugaku_gpt.launch.processes import MARK
from fugaku_gpt.records.run import CLAIM, INTERRUPTED, LOST, Result
from tests.support.killed_run import DEAD, killed_run


def test_the_end_of_a_run_of_which_nobody_is_left_is_recorded(tmp_path: Path) -> None:
    directory = killed_run(tmp_path / "run")
    result = conclude_lost_run(directory.path)
    assert result is not None and result == directory.result()
    assert (result.status, result.iterations, result.judged, result.rank) == (LOST, 3, True, None)
    assert result.reason.startswith(f"process {DEAD.process} on {DEAD.host} and all ranks are gone, and none has rec")
    assert result.summary["last_loss"] == 4.0 and result.ended >= result.started > 1e9
    assert conclude_lost_runs([directory.path]) == [], "once"
    assert directory.write_result(Result(INTERRUPTED, "stopped: x", 1.0, 2.0), replace=False), "by a rank that knows"


def test_nothing_is_concluded_about_a_run_that_may_have_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = psutil.Process()
    holders = {
        "alive": replace(DEAD, process=me.pid, born=me.create_time()),
        "elsewhere": replace(DEAD, host="another"),
        "job": replace(DEAD, job="7"),
    }
    for name, holder in holders.items():
        assert conclude_lost_run(killed_run(tmp_path / name, holder).path) is None, name
    many_hosts = killed_run(tmp_path / "hosts")
    many_hosts.write_environment({"ranks": [{"host": DEAD.host}, {"host": "another"}]})
    unknown_hosts = killed_run(tmp_path / "unknown")
    (unknown_hosts.path / "environment.json").unlink()
    of_another_user = killed_run(tmp_path / "user")
    claims = list(of_another_user.path.glob(f"{CLAIM}.*"))
    monkeypatch.setattr("os.getuid", lambda: claims[0].stat().st_uid + 1)
    assert conclude_lost_run(of_another_user.path) is None
    monkeypatch.undo()
    of_a_job = killed_run(tmp_path / "submitted")
    (of_a_job.path / "job.jsonl").write_text("")
    damaged = killed_run(tmp_path / "damaged")
    (damaged.path / "result.json").write_text("{")
    for directory in (many_hosts, unknown_hosts, of_a_job, damaged):
        assert conclude_lost_run(directory.path) is None
    assert conclude_lost_run(tmp_path / "no run") is None


def test_a_process_with_the_mark_of_the_run_lives(tmp_path: Path) -> None:
    """As where the MPI launcher has survived the kill of its own: the ranks train on."""
    directory = killed_run(tmp_path / "run")
    rank = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env={**os.environ, MARK: DEAD.name},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert rank.stdin is not None and rank.stdout is not None
    rank.stdout.readline()
    assert conclude_lost_run(directory.path) is None
    rank.stdin.close()
    rank.wait()
    assert conclude_lost_run(directory.path) is not None


@pytest.mark.parametrize("command", [["runs", "ls", "."], ["runs", "show", "run"], ["doctor", "run", "run"]])
def test_the_next_command_that_reads_a_lost_run_records_its_end(
    tmp_path: Path, command: List[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = killed_run(tmp_path / "run")
    assert run(command) == 0
    output = capsys.readouterr().out
    assert "lost" in output and "all ranks are gone" in output
    result = directory.result()
    assert result is not None and result.status == LOST
