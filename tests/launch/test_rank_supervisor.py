"""Tests of the supervisor of a rank: it reports how the rank ended, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Tuple

import psutil
import pytest

from fugaku_gpt.records.run import FAILED, Result, RunDirectory
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # each test starts processes and waits for their end

# a rank that announces the run directory to its supervisor, prints its process id, and runs the given code
RANK = """
import os, sys, time
from pathlib import Path
from fugaku_gpt.launch.rank_supervisor import supervise_rank
announce = supervise_rank(int(sys.argv[1]))
if sys.argv[2]:
    announce(Path(sys.argv[2]))
print(os.getpid(), flush=True)
{behaviour}
"""
SLEEP = "time.sleep(60)"


def start(rank: int, directory: Path, behaviour: str = SLEEP) -> Tuple["subprocess.Popen[str]", int]:
    """Start a supervisor; return it and the process id of its rank."""
    command = [sys.executable, "-c", RANK.format(behaviour=behaviour), str(rank), str(directory)]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    return supervisor, int(supervisor.stdout.readline())


def end_of(supervisor: "subprocess.Popen[str]") -> Tuple[int, List[str]]:
    _, errors = supervisor.communicate(timeout=30)
    return supervisor.returncode, errors.splitlines()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_reported_with_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    supervisor, rank = start(3, tmp_path)
    os.kill(rank, number)
    code, errors = end_of(supervisor)
    result = RunDirectory(tmp_path).result()
    assert result is not None and (result.status, result.rank, result.node) == (FAILED, 3, os.uname().nodename)
    assert result.reason == f"rank 3: killed by signal {int(number)} ({number.name})"
    assert code == 128 + number and errors == [f"fugaku-gpt: {result.reason}"]


def test_a_supervisor_exits_with_the_exit_code_of_the_rank(tmp_path: Path) -> None:
    supervisor, _ = start(0, tmp_path, "sys.exit(75)")
    assert end_of(supervisor) == (75, []) and list(tmp_path.iterdir()) == []


def test_a_killed_supervisor_takes_the_rank_with_it(tmp_path: Path) -> None:
    supervisor, rank = start(1, tmp_path)
    supervisor.kill()
    end_of(supervisor)
    until(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE)


def test_signals_are_passed_on(tmp_path: Path) -> None:
    # short sleeps: Python looks at a signal that comes just before a sleep when that is over
    caught = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
print('up', flush=True)
for _ in range(6000): time.sleep(0.01)
"""
    supervisor, _ = start(1, tmp_path, caught)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "up\n"
    supervisor.send_signal(signal.SIGUSR1)
    assert end_of(supervisor)[0] == 9
    supervisor, _ = start(1, tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    assert end_of(supervisor)[0] == 128 + signal.SIGTERM
    result = RunDirectory(tmp_path).result()
    assert result is not None and result.status == "interrupted"


def test_a_signal_that_comes_before_the_supervisor_is_ready_is_passed_on(tmp_path: Path) -> None:
    slow = """
import os, signal, time
from fugaku_gpt.launch import rank_supervisor
begin = rank_supervisor._RankSupervisor.wait
rank_supervisor._RankSupervisor.wait = lambda *arguments: (time.sleep(1), begin(*arguments))[1]
rank_supervisor.supervise_rank(1)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
print("up", flush=True)
for _ in range(6000): time.sleep(0.01)
"""
    command = [sys.executable, "-c", slow]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "up\n"
    supervisor.send_signal(signal.SIGUSR1)
    assert end_of(supervisor)[0] == 9


def test_rank_0_reports_how_another_rank_failed(tmp_path: Path) -> None:
    supervisor, rank = start(0, tmp_path)
    failure = Result(
        FAILED, "rank 2: ValueError: x", 0.0, time.time() + 900, 7, rank=2, node="n1", last_checkpoint="step-00000005"
    )
    RunDirectory(tmp_path).write_result(failure)
    assert supervisor.stderr is not None
    assert supervisor.stderr.readline() == "fugaku-gpt: rank 2: ValueError: x\n"
    assert supervisor.stderr.readline() == "  on n1, last iteration 7, last checkpoint: step-00000005\n"
    os.kill(rank, signal.SIGKILL)
    end_of(supervisor)
    assert RunDirectory(tmp_path).result().rank == 0  # type: ignore[union-attr]  # its death came before that end


def test_a_result_that_cannot_be_read_does_not_cost_the_rank(tmp_path: Path) -> None:
    supervisor, rank = start(0, tmp_path)
    (tmp_path / "result.json").write_text("{")  # being written, as another node may see it
    time.sleep(0.6)  # several polls of the supervisor
    assert supervisor.poll() is None and psutil.Process(rank).is_running()
    os.kill(rank, signal.SIGKILL)
    assert end_of(supervisor)[0] == 128 + signal.SIGKILL


def test_a_secondary_failure_does_not_replace_the_first_result(tmp_path: Path) -> None:
    first = Result(FAILED, "rank 2: ValueError: x", 0.0, time.time(), rank=2)
    RunDirectory(tmp_path).write_result(first)
    supervisor, rank = start(1, tmp_path)
    os.kill(rank, signal.SIGKILL)
    end_of(supervisor)
    assert RunDirectory(tmp_path).result() == first
