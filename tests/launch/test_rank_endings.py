"""Tests of how ranks ended, by the lines that MPICH's and Open MPI's launchers print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.launch import launcher
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.launch.rank_endings import RankEndings
from fugaku_gpt.launch.rank_watch import RankWatch
from fugaku_gpt.records.run import RunDirectory

HOST = os.uname().nodename
MPICH_KILLED = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 25726 RUNNING AT localhost
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
===================================================================================
[mpiexec@node7] Exit codes: [localhost] 9,9,9
"""
OPEN_MPI_4 = """
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[5436,1],2]
  Exit code:    3
"""
OPEN_MPI_5 = """
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-node7-4711@1,0] Exit code:    3
"""
OPEN_MPI_KILLED = "mpirun noticed that process rank 1 with PID 0 on node node7 exited on signal 9 (Killed)."


def endings(text: str) -> RankEndings:
    read = RankEndings()
    for line in text.splitlines():
        read.read(line)
    return read


def test_the_line_of_statuses_is_not_passed_on() -> None:
    lines: List[str] = []
    read = RankEndings(lines.append)
    for line in ("one", "[mpiexec@node7] Exit codes: [localhost] 0,35072,11", "two"):
        read.read(line)
    assert lines == ["one", "two"] and read.statuses == [0, 137 << 8, 11]
    assert read.reason([1]) == f"rank 1 on {HOST} ended (exit code 137) before it joined MPI"
    assert read.reason([1, 2]) == (
        f"ranks 1, 2 on {HOST} ended (exit code 137, signal 11, SIGSEGV) before they joined MPI"
    )
    assert RankEndings().reason([1]) == f"rank 1 on {HOST} ended before it joined MPI"


@pytest.mark.parametrize(
    ("text", "exit_code", "subject"),
    [
        (MPICH_KILLED, 9, f"a rank on {HOST} ended (signal 9, SIGKILL)"),
        ("[mpiexec@n] Exit codes: [localhost] 9,11,9", 11, f"rank 1 on {HOST} ended (signal 11, SIGSEGV)"),
        (OPEN_MPI_4, 3, f"rank 2 on {HOST} ended (exit code 3)"),
        (OPEN_MPI_5, 3, f"rank 0 on {HOST} ended (exit code 3)"),
        (OPEN_MPI_KILLED, 137, f"rank 1 on {HOST} ended (signal 9, SIGKILL)"),
    ],
)
def test_the_rank_that_ended_first_is_named(text: str, exit_code: int, subject: str) -> None:
    """Where the launcher has killed the others alike, it prints the first process in their order."""
    assert endings(text).reason_of_first(exit_code) == f"{subject} before it joined MPI"


def test_no_rank_is_named_where_none_was_killed() -> None:
    """Ranks that refuse the same mistake of the user's end with exit codes, and MPICH's launcher kills the rest."""
    assert endings("[mpiexec@n] Exit codes: [localhost] 512,9").reason_of_first(2) == ""
    assert endings("").reason_of_first(1) == ""
    refused = OPEN_MPI_4.replace("Exit code:    3", "Exit code:    2")
    assert endings(refused).reason_of_first(2) == ""


def test_endings_are_read_though_the_terminal_is_gone() -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError("the terminal is gone")

    endings = RankEndings(gone)
    endings.read("some output")
    endings.read("[mpiexec@node] Exit codes: [node] 0,9")
    assert endings.statuses == [0, 9]


@pytest.mark.parametrize(
    ("text", "exit_code", "sentence"),
    [
        (
            MPICH_KILLED,
            9,
            f"the supervisor of a rank on {HOST} was killed by signal 9 (SIGKILL), and its rank with it;",
        ),
        (
            "[mpiexec@n] Exit codes: [localhost] 11,9,9",
            11,
            f"the supervisor of rank 0 on {HOST} was killed by signal 11 (SIGSEGV)",
        ),
        (OPEN_MPI_KILLED, 137, f"the supervisor of rank 1 on {HOST} was killed by signal 9 (SIGKILL)"),
        (OPEN_MPI_4, 3, ""),  # it has ended by itself
        ("[mpiexec@n] Exit codes: [localhost] 35072,9", 9, ""),  # rank 0 was killed, and rank 1 for it
        ("", 9, ""),
    ],
)
def test_a_supervisor_that_was_killed_is_named(text: str, exit_code: int, sentence: str) -> None:
    reason = endings(text).reason_of_supervisor(exit_code)
    assert reason.startswith(sentence) and bool(reason) is bool(sentence)


def test_a_lost_proxy_is_noticed() -> None:
    line = "[mpiexec@n] control_cb (/mpich/src/pm/hydra/mpiexec/pmiserv_cb.c:280): assert (!closed) failed"
    assert endings(line).has_lost_proxy and not endings(MPICH_KILLED).has_lost_proxy


def test_a_rank_killed_before_it_joined_is_named_where_its_helper_is_lost_too(tmp_path: Path) -> None:
    lost = "[mpiexec@node7] control_cb (../mpiexec/pmiserv_cb.c:280): assert (!closed) failed"
    ended = Outcome(11, None, False, 1.0, 0)
    watch, directory = RankWatch("mark", 2, lambda: False), RunDirectory(tmp_path)

    def reason(text: str, has_joined: bool) -> str:
        return launcher._lost_reason(ended, watch, endings(text), has_joined, directory)

    killed = f"{lost}\n[mpiexec@node7] Exit codes: [localhost] 0,11\n"
    assert reason(killed, False) == f"rank 1 on {HOST} ended (signal 11, SIGSEGV) before it joined MPI"
    assert "hydra_pmi_proxy" in reason(lost, False) and "hydra_pmi_proxy" in reason(killed, True)
