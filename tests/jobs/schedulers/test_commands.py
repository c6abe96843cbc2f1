"""Tests of scheduler commands: no shell, a time limit, and a clear error for a missing command."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandTimeout, query_intervals, run_command
from fugaku_gpt.jobs.schedulers.registry import NAMES, scheduler_named


def test_a_result_has_exit_code_output_and_errors(tmp_path: Path) -> None:
    program = (
        "import os, sys; print(os.getcwd(), flush=True); print('no', file=sys.stderr); "
        "sys.stdout.buffer.write(b'\\xff'); sys.exit(3)"
    )
    answer = run_command([sys.executable, "-c", program], cwd=tmp_path)
    assert (answer.code, answer.err) == (3, "no\n")
    assert answer.out == f"{tmp_path}\n\ufffd"
    assert answer.message == "no"


def test_arguments_are_not_interpreted_by_a_shell() -> None:
    answer = run_command([sys.executable, "-c", "import sys; print(sys.argv[1])", "$(id); rm -rf * | `x`"])
    assert answer.out == "$(id); rm -rf * | `x`\n"


def test_a_missing_command_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match="no-such-pjsub: no such command on this machine.*login node"):
        run_command(["no-such-pjsub"])


def test_a_missing_folder_is_not_taken_for_a_missing_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        run_command([sys.executable, "-c", ""], cwd=tmp_path / "none")


def test_a_command_that_does_not_answer_is_ended() -> None:
    with pytest.raises(CommandTimeout, match="no answer within 0.2 s"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_a_user_s_own_formats_do_not_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    program = "import os; print('SQUEUE_FORMAT' in os.environ, os.environ['SLURM_CONF'], os.environ['LC_ALL'])"
    assert run_command([sys.executable, "-c", program]).out == "False /etc/slurm.conf C\n"


def test_waits_grow_up_to_a_maximum() -> None:
    assert list(itertools.islice(query_intervals(), 8)) == [0, 2, 4, 8, 16, 32, 60, 60]
    assert list(itertools.islice(query_intervals(max_wait=5), 5)) == [0, 2, 4, 5, 5]


@pytest.mark.parametrize("name", NAMES)
def test_every_scheduler_is_looked_up_by_name(name: str) -> None:
    assert scheduler_named(name).name == name


def test_an_unknown_scheduler_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UsageError, match="'sge': not known; valid: pjm, slurm, local"):
        scheduler_named("sge")
