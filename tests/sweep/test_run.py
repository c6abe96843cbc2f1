"""Tests of running a sweep: it survives failures, keeps finished runs, runs missing ones, mixes no configurations."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.processes import Outcome, marked_processes
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.records.run import INTERRUPTED, LOST, Result, RunDirectory
from fugaku_gpt.records.sweep import read_sweep_entry
from fugaku_gpt.sweep.expand import Sweep, expand_sweep
from fugaku_gpt.sweep.lock import CLAIM, FILE, SweepLock
from fugaku_gpt.sweep.run import run_sweep
from tests.sweep.fake import FakeLaunch, QuietProgress, failing, leave_run, outcome, statuses, succeeding

TEXT = """
preset: tiny
matrix:
  layout.tp: [1, 2, 3]
  training.seed: [1]
include:
  - {label: last, layout.dp: 2, job.elapse: 0:01:00}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    file = tmp_path / "s.yaml"
    file.write_text(TEXT, encoding="utf-8")
    return expand_sweep(file)


def test_every_row_is_run_even_if_another_row_fails(sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch = FakeLaunch(dp1_tp1_seed1=failing)
    ended = run_sweep(sweep, out, launch, QuietProgress(), timeout=90)
    assert statuses(ended) == {
        "dp1-tp1-seed1-r1": "failed",
        "dp1-tp2-seed1-r1": "ok",
        "dp1-tp3-seed1-r1": "refused",
        "last-r1": "ok",
    }
    assert launch.started == ["dp1-tp1-seed1-r1", "dp1-tp2-seed1-r1", "last-r1"]
    assert launch.timeouts == [90, 90, 60]  # the run's own limit is the shorter one
    assert [ended_run.has_failed for ended_run in ended] == [True, False, False, False]
    refused = RunDirectory(out / "dp1-tp3-seed1-r1").result()
    assert refused is not None and "layout.tp: 3: must divide model.heads 4" in refused.reason
    entry = read_sweep_entry(out / "last-r1")
    assert entry is not None and (entry.row, entry.order, entry.repeat) == ("last", 3, 1)


@pytest.mark.slow
def test_the_same_command_runs_only_missing_runs(sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stopped(directory: Path, config: RunConfig) -> Outcome:
        leave_run(directory, config, None)
        return outcome(15, stopped_by=signal.SIGINT)

    first = run_sweep(sweep, out, FakeLaunch(dp1_tp1_seed1=failing, dp1_tp2_seed1=stopped), QuietProgress())
    assert statuses(first) == {"dp1-tp1-seed1-r1": "failed", "dp1-tp2-seed1-r1": INTERRUPTED}  # and no further
    second = FakeLaunch()
    progress = QuietProgress()
    ended = run_sweep(sweep, out, second, progress)
    assert second.started == ["dp1-tp2-seed1-r1", "last-r1"] and progress.earlier_runs == ["dp1-tp1-seed1-r1"]
    assert set(statuses(ended).values()) == {"failed", "ok", "refused"}
    assert (out / "attempts" / "dp1-tp2-seed1-r1" / "1" / "log.txt").exists()
    third = FakeLaunch(dp1_tp1_seed1=failing)
    run_sweep(sweep, out, third, QuietProgress(), retry_failed=True)
    run_sweep(sweep, out, third, QuietProgress(), retry_failed=True)
    assert third.started == ["dp1-tp1-seed1-r1"] * 2
    assert sorted(os.listdir(out / "attempts" / "dp1-tp1-seed1-r1")) == ["1", "2"]


def test_a_run_that_was_lost_with_its_sweep_is_run_again(sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_sweep(sweep, out, FakeLaunch(), QuietProgress())
    record = RunDirectory(out / "dp1-tp2-seed1-r1")
    record.write_result(Result(LOST, "process 7 on n1 and all ranks are gone", 1.0, 2.0, judged=True))
    again = FakeLaunch()
    assert set(statuses(run_sweep(sweep, out, again, QuietProgress())).values()) == {"ok", "refused"}
    assert again.started == ["dp1-tp2-seed1-r1"]


def test_a_sweep_stopped_while_a_finished_run_is_profiled_ends_and_keeps_the_run(tmp_path: Path) -> None:
    file, out = tmp_path / "s.yaml", tmp_path / "out"
    file.write_text(TEXT, encoding="utf-8")
    sweep = expand_sweep(file, ["training.iterations=4", "training.profile_operators=2"])

    def stopped(directory: Path, config: RunConfig) -> Outcome:
        leave_run(directory, config)
        record = RunDirectory(directory)
        result = record.result()
        assert result is not None
        record.write_result(replace(result, ended=time.time()))
        return outcome(15, stopped_by=signal.SIGINT)

    ended = run_sweep(sweep, out, FakeLaunch(dp1_tp1_seed1=stopped), QuietProgress())
    assert statuses(ended) == {"dp1-tp1-seed1-r1": "ok"} and ended[-1].was_stopped
    second = FakeLaunch()
    run_sweep(sweep, out, second, QuietProgress())
    assert second.started == ["dp1-tp2-seed1-r1", "last-r1"]


def test_a_killed_run_without_result_is_run_again(sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_sweep(sweep, out, FakeLaunch(), QuietProgress())
    (out / "last-r1" / "result.json").unlink()
    again = FakeLaunch()
    run_sweep(sweep, out, again, QuietProgress())
    assert again.started == ["last-r1"]


def test_other_configurations_under_the_same_name_are_not_mixed(sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_sweep(sweep, out, FakeLaunch(), QuietProgress())
    changed = expand_sweep(tmp_path / "s.yaml", ["training.iterations=77"])
    launch = FakeLaunch()
    message = r"dp1-tp1-seed1-r1 .*\(training.iterations: 100 then, 77 now\); choose another --out"
    with pytest.raises(UsageError, match=message):
        run_sweep(changed, out, launch, QuietProgress())
    assert launch.started == []


def test_foreign_files_are_not_touched(sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "last-r1").mkdir(parents=True)
    (out / "last-r1" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds files that are not a sweep's"):
        run_sweep(sweep, out, FakeLaunch(), QuietProgress())
    assert (out / "last-r1" / "thesis.txt").read_text() == "mine"


def test_files_of_a_run_killed_before_it_started_are_not_foreign(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "last-r1").mkdir(parents=True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the temporary file was written, and without a chance to tidy up
        patch.setattr(os, "replace", killed)
        patch.setattr("fugaku_gpt.records.files._remove", lambda path: None)
        with pytest.raises(KeyboardInterrupt):
            write_text_atomically(out / "last-r1" / "sweep.json", "{}")
    assert len(os.listdir(out / "last-r1")) == 1
    launch = FakeLaunch()
    run_sweep(sweep, out, launch, QuietProgress())
    assert "last-r1" in launch.started


def test_a_row_for_more_nodes_than_available_is_refused(tmp_path: Path) -> None:
    def more_nodes(directory: Path, config: RunConfig) -> Outcome:
        raise UsageError("job.nodes: 2: ranks are started on this machine only; valid: 1")

    file = tmp_path / "s.yaml"
    file.write_text(
        "preset: tiny\ninclude: [{label: big, layout.dp: 2, job.nodes: 2}, {label: small}]", encoding="utf-8"
    )
    ended = run_sweep(expand_sweep(file), tmp_path / "out", FakeLaunch(big=more_nodes), QuietProgress())
    assert statuses(ended) == {"big-r1": "refused", "small-r1": "ok"}
    assert ended[0].has_failed  # it was to be run, and was not


def test_a_row_that_does_not_fit_is_a_refused_row(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    rows = "[{label: big, node.memory_limit: 100Mi}, {label: forced, node.memory_limit: 100Mi, node.memory_check: no}]"
    file.write_text(f"preset: tiny\ninclude: {rows}", encoding="utf-8")
    launch = FakeLaunch()
    ended = run_sweep(expand_sweep(file), tmp_path / "out", launch, QuietProgress())
    assert statuses(ended) == {"big-r1": "refused", "forced-r1": "ok"} and launch.started == ["forced-r1"]
    result = RunDirectory(tmp_path / "out" / "big-r1").result()
    assert result is not None and "there are 36 MiB (node.memory_limit" in result.reason


def test_two_sweeps_do_not_share_a_directory(sweep: Sweep, tmp_path: Path) -> None:
    with SweepLock(tmp_path), pytest.raises(UsageError, match=f"already running there .process {os.getpid()}"):
        run_sweep(sweep, tmp_path, FakeLaunch(), QuietProgress())
    run_sweep(sweep, tmp_path, FakeLaunch(), QuietProgress())


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_lock_and_leftover_ranks_are_ended(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time; from pathlib import Path; from fugaku_gpt.sweep.lock import SweepLock\n"
        "with SweepLock(Path(sys.argv[1])) as lock:\n"
        "    environment = {**os.environ, 'FUGAKU_GPT_LAUNCH': lock.mark}\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env=environment, stdout=-3)\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
    mark = json.loads((tmp_path / FILE).read_text())["mark"]
    with pytest.raises(UsageError, match="already running"):
        SweepLock(tmp_path).__enter__()
    holder.kill()
    holder.communicate()
    assert len(marked_processes(mark)) == 1
    with SweepLock(tmp_path):
        assert marked_processes(mark) == []
    assert uuid.UUID(mark)


def test_progress_lines(capsys: pytest.CaptureFixture[str], sweep: Sweep, tmp_path: Path) -> None:
    from fugaku_gpt.sweep.progress import PlainProgress, last_iteration

    def slow(directory: Path, config: RunConfig) -> Outcome:
        assert last_iteration(directory / "metrics.jsonl") is None
        result: Any = succeeding(directory, config)
        with open(directory / "metrics.jsonl", "a") as stream:
            stream.write('{"kind": "iterat')
        newest = last_iteration(directory / "metrics.jsonl")
        assert newest is not None and newest["iteration"] == 4
        return outcome() if result.ok else result

    with PlainProgress(sys.stderr) as progress:
        run_sweep(sweep, tmp_path / "out", FakeLaunch(dp1_tp1_seed1=slow), progress)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[1/4] dp1-tp1-seed1-r1: started"
    assert lines[1] == "[1/4] dp1-tp1-seed1-r1: ok, 2.0 s, 0.5 s/it, loss 7.000 to 4.000, validation 8.000 to 4.500"


@pytest.mark.slow
def test_the_live_display_follows_the_run_and_leaves_result_lines(
    capfd: pytest.CaptureFixture[str], sweep: Sweep, tmp_path: Path
) -> None:
    from fugaku_gpt.sweep.progress import LiveProgress

    def slow(directory: Path, config: RunConfig) -> Outcome:
        result = succeeding(directory, config)
        time.sleep(0.7)  # the display looks twice a second
        return result

    with LiveProgress() as progress:
        run_sweep(sweep, tmp_path / "out", FakeLaunch(dp1_tp1_seed1=slow, dp1_tp2_seed1=failing), progress)
    output = " ".join(capfd.readouterr().err.split())
    assert "[1/4] dp1-tp1-seed1-r1: ok, 2.0 s, 0.5 s/it" in output
    assert "[2/4] dp1-tp2-seed1-r1: failed: rank 1: ValueError: no such thing" in output


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_claim_file_replaces_missing_file_system_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with SweepLock(tmp_path):
        assert "its file system has no locks" in capsys.readouterr().err
        with pytest.raises(UsageError, match=rf"already running there .process {os.getpid()} on .*remove .*claim.1"):
            SweepLock(tmp_path).__enter__()
    with SweepLock(tmp_path):  # released
        pass
    assert sorted(os.listdir(tmp_path)) == [FILE]
    gone = {"name": "x", "host": socket.gethostname(), "process": 2**22 + 1, "born": 1.0, "job": ""}
    (tmp_path / f"{CLAIM}.1").write_text(json.dumps(gone))
    with SweepLock(tmp_path):
        pass
    (tmp_path / f"{CLAIM}.1").write_text(json.dumps({**gone, "host": "another"}))
    with pytest.raises(UsageError, match="on another"):
        SweepLock(tmp_path).__enter__()
