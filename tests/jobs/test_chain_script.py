"""Tests of what the script of a chain's link does, by running it: which links continue, and with which exit code."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.records.job import exit_records
from tests.jobs.cases import rendered
from tests.jobs.test_render import dump_program, run_script


@pytest.mark.parametrize(("before", "started"), [(75, True), (0, False), (1, False), (None, False)])
def test_a_link_of_a_chain_runs_only_if_the_previous_link_is_to_be_resumed(
    tmp_path: Path, before: int, started: bool
) -> None:
    dump_program(tmp_path, "mpiexec")
    text = rendered("pjm-chain").text
    if before is not None:
        run_script(
            tmp_path, text, {"PJM_JOBID": "5", "PJM_SUBJOBID": "5_0", "PJM_STEPNUM": "0", "EXIT_WITH": str(before)}
        )
        (tmp_path / "called-mpiexec.json").unlink()
    variables = {"PJM_JOBID": "5", "PJM_SUBJOBID": "5_1", "PJM_STEPNUM": "1"}
    run_script(tmp_path, text, variables)
    assert (tmp_path / "called-mpiexec.json").exists() == started


@pytest.fixture
def killed_link(tmp_path: Path) -> Path:
    """The folder of a chain whose first link has begun and left no record, as where its node has died."""
    dump_program(tmp_path, "mpiexec")
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit/.5_0.began").touch()
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def run_link(folder: Path, link: int, code: int = 0) -> Tuple[int, bool]:
    """Run the script of one link of four, whose ranks end with a code; returns its exit code, and whether it has
    started ranks.
    """
    variables = {"PJM_JOBID": "5", "PJM_SUBJOBID": f"5_{link}", "PJM_STEPNUM": str(link), "EXIT_WITH": str(code)}
    ended = run_script(folder, rendered("pjm-chain").text, variables)
    called = folder / "called-mpiexec.json"
    has_started = called.exists()
    called.unlink() if has_started else None
    return ended, has_started


def recorded_exit(folder: Path, link: int) -> Tuple[int, str]:
    record = exit_records(folder)[f"5_{link}"]
    return record.exit_code, record.signal


def set_age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def test_a_link_continues_after_a_link_that_was_killed_and_records_it(killed_link: Path) -> None:
    assert run_link(killed_link, 1) == (76, True)
    assert recorded_exit(killed_link, 0) == (75, "KILL") and recorded_exit(killed_link, 1) == (0, "")


def test_a_second_link_that_is_killed_ends_the_chain_unless_a_checkpoint_was_written_in_between(
    killed_link: Path,
) -> None:
    (killed_link / "exit/.killed").touch()
    set_age(killed_link / "exit/.killed", 60)
    assert run_link(killed_link, 1) == (76, False)
    assert "5_0" not in exit_records(killed_link)
    checkpoint = killed_link / "checkpoints/step-00000010"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").touch()
    set_age(checkpoint / "manifest.json", 120)
    assert run_link(killed_link, 1) == (76, False)
    (checkpoint / "manifest.json").touch()  # of a checkpoint that the node's death has kept out of latest.json
    assert run_link(killed_link, 1) == (76, True)


def test_no_link_follows_a_link_without_memory(killed_link: Path) -> None:
    set_age(killed_link / "exit/.5_0.began", 60)
    (killed_link / "result.json").write_text('{"status": "out_of_memory"}', encoding="utf-8")
    assert run_link(killed_link, 1) == (76, False)


def test_the_last_link_of_a_chain_ends_with_exit_code_0(killed_link: Path) -> None:
    (killed_link / "exit/.5_2.began").touch()
    assert run_link(killed_link, 3) == (0, True)


@pytest.mark.parametrize(
    ("reason", "has_checkpoint", "code"),
    [
        ("", True, 75),  # the node had the process that would have recorded it, too
        ("rank 1: killed by signal 9 (SIGKILL)", True, 75),
        ("rank 1: killed by signal 9 (SIGKILL)", False, 9),
        ("rank 1: loss is not finite", True, 9),
    ],
)
def test_a_link_whose_ranks_are_killed_is_to_be_resumed_if_it_has_got_on(
    tmp_path: Path, reason: str, has_checkpoint: bool, code: int
) -> None:
    writes = f'echo \'{{"status": "failed", "reason": "{reason}"}}\' > result.json; ' if reason else ""
    if has_checkpoint:
        writes += "mkdir checkpoints; touch checkpoints/latest.json; "
    (tmp_path / "mpiexec").write_text(f"#!/bin/bash\nsleep 0.05; {writes}exit 9\n", encoding="utf-8")
    (tmp_path / "mpiexec").chmod(0o755)
    assert run_link(tmp_path, 0)[0] == code
    assert recorded_exit(tmp_path, 0) == (code, "")
