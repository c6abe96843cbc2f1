"""Tests of reports on how a run ended, from its launcher, its log and its own record."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.launch.launch_result import failure_reason, log_tail, printed_error, result_of_launch
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.records.run import RunDirectory
from tests.sweep.fake import leave_run, outcome

HYDRA = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   EXIT CODE: 9
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""


@pytest.mark.parametrize(
    ("own", "log", "ended", "status", "reason"),
    [
        ("ok", "", outcome(), "ok", ""),
        ("ok", "", outcome(1), "failed", "exit code 1"),
        ("failed", "", outcome(1), "failed", "own words"),
        ("oom", "", outcome(1), "oom", "own words"),
        ("failed", "", outcome(15, timed_out=True), "timeout", "ended after 0:00:02"),
        (None, "", outcome(15, stopped_by=2), "interrupted", "stopped by Ctrl-C (SIGINT)"),
        ("ok", "", outcome(15, stopped_by=2), "interrupted", "stopped by Ctrl-C (SIGINT)"),
        (None, "something\n" + HYDRA, outcome(9), "failed", "exit code 9: something"),
        (None, "", outcome(-9), "failed", "signal 9"),
        (None, HYDRA, outcome(9, oom_kills=1), "oom", "1 processes killed by the kernel"),
        (None, "  File x\nMemoryError: 3 GiB\n", outcome(1), "oom", "MemoryError: 3 GiB"),
        (None, "slurmstepd: error: Detected 1 oom-kill event(s)\n", outcome(1), "oom", "Detected 1 oom-kill event"),
        ("failed", "RuntimeError: can't allocate memory: 8 GB\n", outcome(1), "oom", "can't allocate memory: 8 GB"),
        (None, "", outcome(0), "failed", "exit code 0, but no result was recorded"),
        (
            None,
            "a\nnumpy.core.AxisError: axis 3\nend\n",
            outcome(1),
            "failed",
            "exit code 1: numpy.core.AxisError: axis 3",
        ),
    ],
)
def test_endings(tmp_path: Path, own: Optional[str], log: str, ended: Outcome, status: str, reason: str) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config, own, "own words" if own not in (None, "ok") else "")
    text = tmp_path / "log.txt"
    text.write_text(log, encoding="utf-8")
    result = result_of_launch(RunDirectory(tmp_path / "run"), config, ended, text, 1000.0)
    assert result.status == status and reason in result.reason
    assert result.iterations == 4 and result.summary["seconds_per_iteration"] == 0.5  # what was measured is kept


def test_a_finished_run_is_ok_without_readable_metrics(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config)
    directory = RunDirectory(tmp_path / "run")
    directory.metrics_file.unlink()
    directory.metrics_file.mkdir()
    assert result_of_launch(directory, config, outcome(), tmp_path / "log.txt", 1000.0) == directory.result()


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_a_record_that_cannot_be_read_is_named_beside_the_cause(tmp_path: Path, name: str) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config, "failed", "own words")
    record = tmp_path / "run" / name
    record.unlink()
    record.mkdir()
    result = result_of_launch(RunDirectory(tmp_path / "run"), config, outcome(1), tmp_path / "log.txt", 1000.0)
    assert result.status == "failed" and f"{record}: " in result.reason
    assert result.reason.startswith("own words" if name == "metrics.jsonl" else "exit code 1")


HEALTHY = (
    "torch 2.13.0\niteration  9/100 | loss: 7.51234 | ETA: 0:01:00\nvalidation at iteration 9 | lm loss: 7.5 |\n"
    "checkpoint at iteration 9: 5.5 MiB per rank\niteration 10/100 | loss: 7.4 | ETA: 0:01:00\n"
)


def test_lines_of_a_healthy_run_are_never_a_cause(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), None)
    log = tmp_path / "log.txt"
    log.write_text(HEALTHY, encoding="utf-8")
    ended = outcome(-9)
    result = result_of_launch(RunDirectory(tmp_path / "run"), load_run_config(preset="tiny"), ended, log, 1000.0)
    assert result.reason == "the launcher was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(("lost_after", "reason"), [(1.0, "mpirun is stopped"), (3.0, "own words")])
def test_an_earlier_end_of_a_rank_stays_the_cause_when_the_launcher_is_lost(
    tmp_path: Path, lost_after: float, reason: str
) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config, "failed", "own words")
    recorded = RunDirectory(tmp_path / "run").result()
    assert recorded is not None
    ended = replace(outcome(-9), lost_reason="mpirun is stopped", lost_after=lost_after)
    log, started = tmp_path / "log.txt", recorded.ended - 2.0
    assert result_of_launch(RunDirectory(tmp_path / "run"), config, ended, log, started).reason == reason


@pytest.mark.parametrize(
    ("ended", "log", "reason"),
    [
        (outcome(-9), "", "the launcher was killed by signal 9 (SIGKILL)"),
        (replace(outcome(9), lost_reason="the supervisor is gone"), "", "the supervisor is gone"),
        (outcome(137), "fugaku-gpt: rank 1: killed by signal 9 (SIGKILL)\n", "rank 1: killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_process_that_is_killed_after_the_last_iteration_is_named_in_a_run_that_is_ok(
    tmp_path: Path, ended: Outcome, log: str, reason: str
) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config)
    text = tmp_path / "log.txt"
    text.write_text(log, encoding="utf-8")
    result = result_of_launch(RunDirectory(tmp_path / "run"), config, ended, text, 1000.0)
    assert (result.status, result.reason) == ("ok", f"after the last iteration: {reason}")


def test_ranks_that_stop_as_their_launcher_was_lost_name_it(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config, "interrupted", "stopped: SIGTERM on vm (rank 1), after iteration 4")
    recorded = RunDirectory(tmp_path / "run").result()
    assert recorded is not None
    ended = replace(outcome(75), is_lost=True, lost_reason="mpirun is stopped")
    log = tmp_path / "log.txt"
    result = result_of_launch(RunDirectory(tmp_path / "run"), config, ended, log, recorded.ended - 2.0)
    assert result.is_resumable and result.reason == "stopped: mpirun is stopped, after iteration 4"


def test_the_lines_of_a_launcher_that_fails_are_no_cause(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), None)
    log = tmp_path / "log.txt"
    log.write_text(
        "[mpiexec@n] control_cb (/mpich/pmiserv_cb.c:280): assert (!closed) failed\n[proxy:0@n] HYD_x (a.c:1): error\n",
        encoding="utf-8",
    )
    ended = outcome(255)
    result = result_of_launch(RunDirectory(tmp_path / "run"), load_run_config(preset="tiny"), ended, log, 1000.0)
    assert result.reason == "exit code 255"


def test_a_killed_launcher_is_recorded_with_signal_and_host(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny")
    leave_run(tmp_path / "run", config, None)
    result = result_of_launch(RunDirectory(tmp_path / "run"), config, outcome(-9), tmp_path / "log.txt", 1000.0)
    assert (result.signal, result.rank, result.node) == (9, None, os.uname().nodename)


@pytest.mark.parametrize("ended", [outcome(15, stopped_by=2), outcome(15, timed_out=True), outcome(1)])
def test_a_finished_run_stays_ok_however_the_profiling_ends(tmp_path: Path, ended: Outcome) -> None:
    config = load_run_config(preset="tiny", overrides=["training.profile_operators=2", "training.iterations=4"])
    leave_run(tmp_path / "run", config)
    result = result_of_launch(RunDirectory(tmp_path / "run"), config, ended, tmp_path / "log.txt", 1000.0)
    assert (result.status, result.reason) == ("ok", "")
    unfinished = load_run_config(preset="tiny", overrides=["training.profile_operators=2", "training.iterations=5"])
    assert (
        result_of_launch(RunDirectory(tmp_path / "run"), unfinished, ended, tmp_path / "log.txt", 1000.0).status != "ok"
    )


def test_a_run_that_never_started_is_refused_with_the_trainers_message(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny")
    log = tmp_path / "log.txt"
    log.write_text("fugaku-gpt: runs/none: not a corpus\n" + HYDRA, encoding="utf-8")
    result: Any = result_of_launch(RunDirectory(tmp_path), config, outcome(2), log, 1.0)
    assert (result.status, result.reason, result.summary) == ("refused", "runs/none: not a corpus", {})


def test_reasons_come_from_the_end_of_the_log(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none") == [] and failure_reason([]) == ""
    log = tmp_path / "log.txt"
    log.write_bytes(b"x" * 100_000 + b"\nValueError: early\n\xff\xfe\none\ntwo\nthree\n")
    assert failure_reason(log_tail(log)) == "ValueError: early"
    assert failure_reason(["one", "two", "three", "four"]) == "two / three / four"


def test_notes_are_no_errors() -> None:
    tail = ["fugaku-gpt: note: model.vocab_size is 50257", "Segmentation fault"]
    assert printed_error(tail) == "" and failure_reason(tail).endswith("Segmentation fault")
