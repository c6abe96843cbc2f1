"""Tests of ``fugaku-gpt sim``, which starts, breaks and stops a simulated PJM from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from fugaku_gpt.simulator.session import stop_simulator
from fugaku_gpt.simulator.spool import Spool

PROGRAM = [sys.executable, "-m", "fugaku_gpt", "sim"]


def sim(*arguments: str, stdin: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, **environment},
        timeout=300,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "the site"
    yield path
    if Spool(path).daemon_pid() is not None:
        stop_simulator(Spool(path))


@pytest.mark.slow
def test_from_start_to_stop(folder: Path, tmp_path: Path) -> None:
    started = sim("start", "--dir", str(folder), "--nodes", "48", "--min-elapse", "1")
    assert started.returncode == 0, started.stderr
    assert started.stderr.splitlines()[0] == "This is a simulated PJM on this machine, not Fugaku."
    export_line = started.stdout
    assert export_line == f"export PATH='{folder}/bin':\"$PATH\"\n"
    assert sim("env", "--dir", str(folder)).stdout == export_line

    (tmp_path / "job.sh").write_text("#PJM -L node=2,elapse=5\necho $PJM_NODE\n")
    waited = subprocess.run(
        ["sh", "-c", f"{export_line}\npjsub -z jid job.sh && pjwait 1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert waited.stdout == "1\n1 0 0 0\n"
    assert (tmp_path / "job.sh.1.out").read_text() == "2\n"

    status = sim("status", "--dir", str(folder)).stdout
    assert "jobs    1 EXT\n" in status and "faults  none\n" in status
    assert sim("fault", "--dir", str(folder), "refuse", "--code", "0072").returncode == 0
    assert "faults  refuse 1\n" in sim("status", FUGAKU_GPT_SIM_DIR=str(folder)).stdout
    refused = subprocess.run([str(folder / "bin" / "pjsub"), "job.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert "[ERR.] PJM 0072 pjsub " in refused.stderr
    unknown = sim("fault", "--dir", str(folder), "explode")
    assert unknown.returncode == 2 and "valid are" in unknown.stderr

    second_start = sim("start", "--dir", str(folder))
    assert second_start.returncode == 2 and "runs there already" in second_start.stderr
    stopped = sim("stop", "--dir", str(folder))
    assert stopped.returncode == 0
    assert Spool(folder).daemon_pid() is None
    for verb in ("stop", "status", "env"):
        assert sim(verb, "--dir", str(folder)).returncode == 2

    assert sim("start", "--dir", str(folder)).returncode == 0  # with the settings of the first start, and its jobs
    assert "jobs    1 EXT\n" in sim("status", "--dir", str(folder)).stdout
    nodes = subprocess.run([str(folder / "bin" / "pjstat"), "--rsc"], capture_output=True, text=True).stdout
    assert nodes.split()[-1] == "48"


@pytest.mark.slow
def test_a_shell_with_the_commands(folder: Path) -> None:
    completed = sim("start", "--dir", str(folder), "--shell", stdin="pjstat\nexit 0\n", SHELL="/bin/sh")
    assert completed.returncode == 0
    assert completed.stdout.startswith("JOB_ID ")
    assert "not Fugaku" in completed.stderr
    assert Spool(folder).daemon_pid() is None


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["start"], ["stop"], ["status"], ["env"], ["fault"]])
def test_help_says_that_pjm_is_simulated(arguments: "list[str]") -> None:
    completed = sim(*arguments, "--help")
    assert completed.returncode == 0
    assert "not Fugaku" in " ".join(completed.stdout.split())
