"""Tests that ranks are missed which are gone while their launcher waits for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import List, Set

import psutil
import pytest

from fugaku_gpt.launch import rank_watch
from fugaku_gpt.launch.launcher import MPICH, find_launcher
from fugaku_gpt.launch.processes import MARK, end_marked_processes, marked_processes
from fugaku_gpt.launch.rank_watch import RankWatch, ranks_of_processes
from fugaku_gpt.records.claim import newest_claim
from fugaku_gpt.records.run import CLAIM, FAILED, RunDirectory
from tests.support.corpus import write_byte_corpus
from tests.support.waiting import until


class Ranks:
    """Ranks that a test lets live and die, and a clock that it moves."""

    def __init__(self) -> None:
        self.living: Set[int] = set()
        self.stopped: List[str] = []
        self.moment = 0.0
        self.joined = False
        self.killed: Set[int] = set()

    def monotonic(self) -> float:
        return self.moment

    def watch(self, ranks: int) -> RankWatch:
        return RankWatch("mark", ranks, lambda: self.joined)

    def after(self, watch: RankWatch, seconds: int) -> List[List[int]]:
        """The ranks that the watch calls gone in the next seconds, asked in each."""
        gone = []
        for _ in range(seconds):
            self.moment += 1.0
            gone += [watch.gone] if watch.has_lost_ranks() else []
        return gone


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    replaced = Ranks()
    monkeypatch.setattr(rank_watch, "time", replaced)
    monkeypatch.setattr(rank_watch, "stopped_launchers", lambda _mark: replaced.stopped)
    monkeypatch.setattr(rank_watch, "ranks_of_processes", lambda _mark: {100 + rank: rank for rank in replaced.living})
    monkeypatch.setattr(os, "kill", lambda process, number: replaced.killed.add(process))
    return replaced


def test_a_launcher_that_stays_stopped_is_named(ranks: Ranks) -> None:
    watch = ranks.watch(2)
    ranks.living, ranks.joined = {0, 1}, True
    for _ in range(3):  # for a moment each time, as by a batch system that suspends the job and resumes it
        ranks.stopped = ["mpirun (process 17)"]
        assert ranks.after(watch, 7) == []
        ranks.stopped = []
        assert ranks.after(watch, 7) == []
    ranks.stopped = ["mpirun (process 17)"]
    assert ranks.after(watch, 20)[0] == [] and watch.stopped == "mpirun (process 17)"
    assert ranks.killed == set()


def test_a_rank_that_is_gone_before_all_have_joined_is_missed_after_a_while(ranks: Ranks) -> None:
    watch = ranks.watch(4)
    ranks.living = {0, 1, 2, 3}
    assert ranks.after(watch, 60) == []
    ranks.living = {0, 2, 3}
    assert ranks.after(watch, 6) == []
    assert ranks.killed == set()
    assert ranks.after(watch, 60)[0] == [1] and ranks.killed == {100, 102, 103}
    ranks.living = {0}
    assert ranks.after(watch, 60)[0] == [1, 2, 3]
    assert watch.ranks_of_processes == {100: 0, 101: 1, 102: 2, 103: 3}


def test_ranks_that_a_launcher_starts_slowly_are_waited_for(ranks: Ranks) -> None:
    watch = ranks.watch(20)
    for rank in range(20):
        ranks.living.add(rank)
        assert ranks.after(watch, 5) == []
    assert ranks.after(watch, 60) == []


@pytest.mark.slow
def test_a_rank_that_was_never_seen_may_not_have_been_started_yet(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow file system takes longer to start Python than a dead rank takes to be missed."""
    watch = ranks.watch(2)
    assert ranks.after(watch, 100) == [] and ranks.killed == set()
    ranks.living = {0}
    assert ranks.after(watch, 100) == [] and ranks.killed == set()
    monkeypatch.setattr(rank_watch, "has_reaped_rank", lambda _mark: True)  # the launcher knows that one has ended
    assert ranks.after(watch, 2)[0] == [1] and ranks.killed == {100}
    monkeypatch.setattr(rank_watch, "has_reaped_rank", lambda _mark: False)
    assert len(ranks.after(ranks.watch(2), 700)) > 0


@pytest.mark.slow
def test_a_stopped_supervisor_is_named_and_a_stopped_rank_is_not(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    code = (
        "import time; from fugaku_gpt.launch.rank_supervisor import supervise_rank; supervise_rank(3).report_joined(); "
        "print('up', flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, MARK: mark, "PMI_RANK": "3", "PMI_SIZE": "4"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "up\n"
    rank = next(process for process in marked_processes(mark) if process.pid != supervisor.pid)
    rank.suspend()
    until(lambda: rank.status() == psutil.STATUS_STOPPED)
    assert rank_watch.stopped_launchers(mark) == []
    supervisor.send_signal(signal.SIGSTOP)
    until(lambda: rank_watch.stopped_launchers(mark) == [f"the supervisor of rank 3 (process {supervisor.pid})"])
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()


LIVING_RANK = "os.environ['PMI_RANK'] = '0'; os.environ['PMI_SIZE'] = '2'; "
LIVING_RANK += "child = os.posix_spawn('/bin/sleep', ['sleep', '600'], os.environ); del os.environ['PMI_RANK']; "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other_child", "is_launcher"),
    [("hydra_pmi_proxy", "", True), ("mpirun", LIVING_RANK, True), ("a script around mpirun", "", False)],
)
def test_a_launcher_whose_child_has_ended_is_recognised(
    name: str, other_child: str, is_launcher: bool, tmp_path: Path
) -> None:
    mark, proxy = uuid.uuid4().hex, tmp_path / name
    proxy.symlink_to(sys.executable)
    ended = "sys.stdin.readline(); os.fork() or os._exit(0); os.wait(); print('reaped', flush=True); "
    process = subprocess.Popen(
        [str(proxy), "-c", f"import os, sys; {other_child}{ended}sys.stdin.readline()"],
        env={**os.environ, MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    until(lambda: len(marked_processes(mark)) == 1 + bool(other_child))
    assert not rank_watch.has_reaped_rank(mark)
    process.stdin.write("end\n")
    process.stdin.flush()
    assert process.stdout.readline() == "reaped\n" and rank_watch.has_reaped_rank(mark) == is_launcher
    end_marked_processes(mark, 0.0)
    process.communicate()


def test_ranks_that_have_joined_end_when_they_want_to_but_not_all_before_their_launcher(ranks: Ranks) -> None:
    watch = ranks.watch(2)
    ranks.joined, ranks.living = True, {0}
    assert ranks.after(watch, 60) == []
    ranks.living = set()
    assert ranks.after(watch, 5) == []
    assert ranks.after(watch, 60)[0] == [0, 1]


@pytest.mark.slow
def test_ranks_are_those_of_living_processes_with_the_mark() -> None:
    mark, processes = uuid.uuid4().hex, []
    for rank in ("0", "3"):
        environment = {**os.environ, MARK: mark, "PMI_RANK": rank, "PMI_SIZE": "4"}
        processes.append(subprocess.Popen(["sleep", "600"], env=environment))
    until(lambda: set(ranks_of_processes(mark).values()) == {0, 3})
    processes[0].kill()
    processes[0].wait()
    assert ranks_of_processes(mark) == {processes[1].pid: 3}
    processes[1].kill()
    processes[1].wait()


# As a node on which Python does not start, or lacks mpi4py; the ranks find out who they are as under either MPI.
RANK_1 = "import os, sys\nif '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')): "
HALF_A_RUN = ["--set", "layout.dp=2", "--set", "model.vocab_size=256", "--ranks", "2"]


def start_with_a_broken_rank(tmp_path: Path, behaviour: str) -> "subprocess.Popen[str]":
    corpus = write_byte_corpus(tmp_path / "bytes")
    (tmp_path / "sitecustomize.py").write_text(RANK_1 + behaviour)
    command = [sys.executable, "-m", "fugaku_gpt", "train", "--preset", "tiny", "--data", str(corpus), *HALF_A_RUN]
    return subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("behaviour", "ending"),
    [
        pytest.param(
            "sys.modules['mpi4py'] = None", "ended (exit code 1) before it joined MPI", marks=pytest.mark.long
        ),
        # Open MPI's launcher does not tell the code
        pytest.param("os._exit(0)", "before it joined MPI", marks=pytest.mark.long),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))",
            "ended (exit code 1) before it joined MPI",
        ),
        ("os._exit(137)", "ended (exit code 137) before it joined MPI"),
        ("os.kill(os.getpid(), 11)", "ended (signal 11, SIGSEGV) before it joined MPI"),
    ],
)
def test_a_rank_that_never_joins_mpi_ends_the_run_and_is_named(tmp_path: Path, behaviour: str, ending: str) -> None:
    process = start_with_a_broken_rank(tmp_path, behaviour)
    output, _ = process.communicate(timeout=300)
    result = RunDirectory(tmp_path / "run").result()
    assert result is not None and result.status == FAILED, output
    assert result.reason.startswith(f"rank 1 on {os.uname().nodename}") and result.reason.endswith(ending), output
    assert process.returncode == 1 and result.reason in output and "Traceback" not in output, output
    if find_launcher().family == MPICH:
        assert re.search(r"ended \((exit code|signal) \d+", result.reason) and "Exit codes" not in output


@pytest.mark.mpi
def test_one_signal_ends_a_run_that_waits_for_a_rank_to_join(tmp_path: Path) -> None:
    """A rank that stops, as one that waits for a file system, is neither gone nor does it join."""
    process = start_with_a_broken_rank(tmp_path, "os.kill(os.getpid(), 19)")

    def mark_of_run() -> str:
        _, holder = newest_claim(tmp_path / "run", CLAIM)
        return holder.name if holder is not None else ""

    until(lambda: mark_of_run() != "" and set(ranks_of_processes(mark_of_run()).values()) == {0, 1})
    mark = mark_of_run()
    time.sleep(1.0)  # rank 0 may be anywhere before or in MPI_Init
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and marked_processes(mark) == []
