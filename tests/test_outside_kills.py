"""Tests that the doctor accuses no rank of a healthy run that was killed from outside, in real runs under ``mpirun``.

The long form, 200 kills, is ``python -m tests.mpi.outside_kills``, a part of ``make soak``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.launch.launcher import MPICH, find_launcher
from tests.mpi.outside_kills import ALL, MPIRUN, PROXY, RANK, SUPERVISOR, Kill, run_kills

pytestmark = [pytest.mark.mpi, pytest.mark.long, pytest.mark.slow]

PAIR = ("layout.dp=2",)
KILLS = (
    Kill(2, PAIR, "checkpoint", ALL, 0.2, 1, True),
    Kill(2, PAIR, "communication", PROXY, 0.5, 0, False),
    Kill(2, PAIR, "evaluation", SUPERVISOR, 0.1, 1, True),
    Kill(2, PAIR, "end", MPIRUN, 0.3, 0, True),
    Kill(2, PAIR, "step", RANK, 0.4, 1, False),
)
REASONS = (
    "none",
    "hydra_pmi_proxy",
    "the supervisor of ",  # rank 1, where that is certain
    "killed by signal 9 (SIGKILL)",
    "rank 1: killed by signal 9 (SIGKILL)",
)


@pytest.mark.skipif(find_launcher().family != MPICH, reason="processes are found by the names of MPICH's launcher")
def test_kills_from_outside_are_named_as_such_and_accuse_no_rank(tmp_path: Path) -> None:
    verdicts = run_kills(list(KILLS), tmp_path, at_once=2)
    wrong = [f"{verdict.kill.name}: {verdict.wrong}; {verdict.text}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(wrong)
    for verdict, reason in zip(verdicts, REASONS):
        assert reason in verdict.result or verdict.kill.stage == "end", verdict
