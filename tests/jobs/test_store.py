"""Tests that the run store is listed as it is after kills, moves and damage, whatever the index says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Dict, List

import pytest

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.store import RunRecord, list_runs, read_record, reindex
from fugaku_gpt.records import index
from fugaku_gpt.records.job import append_event
from fugaku_gpt.records.run import OK, MetricsWriter, Result, RunDirectory
from fugaku_gpt.records.sweep import SweepEntry, write_sweep_entry
from tests.support.job_records import record_submission
from tests.sweep.fake import leave_run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = load_run_config(preset="tiny", overrides=["layout.dp=2"])


@pytest.fixture(autouse=True)
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once; a coarse clock has a separate test."""
    monkeypatch.setattr(index, "TICK_NS", -(10**12))


def by_path(store: Path) -> Dict[str, RunRecord]:
    return {record.run: record for record in list_runs(store).runs}


def make(path: Path, status: str = OK) -> RunDirectory:
    leave_run(path, CONFIG, status)
    return RunDirectory(path)


@pytest.mark.slow
def test_80_kills_lose_no_acknowledged_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.jobs.store_kills", str(tmp_path / "runs"), "80", "7"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300)
    counts = json.loads(done.stdout)
    assert counts["kills"] >= 80 and counts["missing"] == [] and counts["damaged"] == []
    assert counts["index agrees"] and counts["from the index"] > 0
    assert counts["acknowledged"] > 80 and counts["continued"] > 0 and counts["rounds of reading"] > 0


def test_runs_sweeps_and_attempts_are_listed_at_any_depth(tmp_path: Path) -> None:
    for path in ("alone", "demo/a-r1", "demo/attempts/a-r1/1", "demo/attempts/a-r1/2", "lab/demo/b-r1"):
        make(tmp_path / path)
    make(tmp_path / "job")
    make(tmp_path / "job" / "attempts" / "1")
    make(tmp_path / "bulk")
    make(tmp_path / "bulk" / "repeat-3")
    make(tmp_path / "job" / "flight")  # a run's own folders are not searched
    (tmp_path / "notes").mkdir()
    write_sweep_entry(tmp_path / "demo" / "a-r1", SweepEntry("demo", "a-r1", "a", 0, 1, "0123", "2.2GHz"))
    records = by_path(tmp_path)
    assert {path: record.attempt for path, record in records.items()} == {
        "alone": 0,
        "bulk": 0,
        "bulk/repeat-3": 0,
        "demo/a-r1": 0,
        "demo/attempts/a-r1/1": 1,
        "demo/attempts/a-r1/2": 2,
        "job": 0,
        "job/attempts/1": 1,
        "lab/demo/b-r1": 0,
    }
    record = records["demo/a-r1"]
    assert (record.sweep, record.row, record.variant, record.repeat) == ("demo", "a", "2.2GHz", 1)
    assert (record.status, record.iterations, record.torch, record.git_commit) == (OK, 4, "2.13.0+cpu", "0123abc")
    assert record.settings["layout.dp"] == 2 and "layout.tp" not in record.settings
    assert record.figures["seconds_per_iteration"] == 0.5 and record.size == "1.1M"
    with pytest.raises(UsageError, match="no such folder"):
        list_runs(tmp_path / "none")


def test_only_changed_runs_are_read_again(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert list_runs(tmp_path).read == 2
    assert list_runs(tmp_path).read == 0
    RunDirectory(tmp_path / "a").write_result(Result("oom", "killed", 1.0, 2.0))
    listing = list_runs(tmp_path)
    assert listing.read == 1 and [record.status for record in listing.runs] == ["oom", OK]
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "c")
    assert [record.run for record in list_runs(tmp_path).runs] == ["c"]
    assert list(index.read_index(tmp_path)) == ["c"]


def test_a_run_that_has_not_ended_is_never_taken_from_the_index(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a")
    run.create(dump_run_config(CONFIG))
    assert [record.status for record in list_runs(tmp_path).runs] == ["unfinished"]
    writer = MetricsWriter(run.metrics_file)
    writer.write("iteration", {"iteration": 7, "seconds": 0.25})
    record = by_path(tmp_path)["a"]
    assert (record.status, record.iterations, record.figures) == ("unfinished", 7, {"seconds_per_iteration": 0.25})
    record_submission(run.path, "12", time=1.0)
    append_event(run.path, "status", 2.0, job_id="12", state="running", raw="RUN")
    record = by_path(tmp_path)["a"]
    assert (record.status, record.scheduler, record.job) == ("running", "pjm", "12")
    assert index.read_index(tmp_path) == {}


@pytest.mark.parametrize("spoil", ["cut", "flip", "other version", "not JSON", "a folder", "nested", "empty"])
def test_a_damaged_index_is_no_error_and_is_ignored(tmp_path: Path, spoil: str) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    file = tmp_path / index.FILE
    content = file.read_bytes()
    if spoil == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif spoil == "flip":
        file.write_bytes(content.replace(b'"status": "ok"', b'"status": "oom"'))
    elif spoil == "other version":
        file.write_bytes(content.replace(b'"version": 1', b'"version": 2', 1))
    elif spoil == "not JSON":
        file.write_bytes(b"\xff\x00\n\x01")
    elif spoil == "nested":
        file.write_bytes(b"[" * 100_000)
    elif spoil == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.mkdir()
    listing = list_runs(tmp_path)
    assert listing.runs == expected and listing.read == 1
    if spoil != "a folder":
        assert list_runs(tmp_path).read == 0


def test_an_index_of_another_program_version_is_read_anew(tmp_path: Path) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    entries = index.read_index(tmp_path)
    fingerprint, record = entries["a"]
    del record["torch"]
    index.write_index(tmp_path, {"a": (fingerprint, record)})
    assert list_runs(tmp_path).runs == expected


def test_a_change_within_a_tick_of_the_clock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "TICK_NS", 10**12)  # nothing of this test is ever old enough
    run = make(tmp_path / "a")
    stat = (run.path / "result.json").stat()
    assert list_runs(tmp_path).read == 1 and list_runs(tmp_path).read == 1
    text = (run.path / "result.json").read_text().replace('"ok"', '"no"')
    with open(run.path / "result.json", "r+") as stream:  # same size, same inode, and the clock has not moved
        stream.write(text.replace('"no"', '"ok"').replace('"iterations": 4', '"iterations": 5'))
    os.utime(run.path / "result.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert by_path(tmp_path)["a"].iterations == 5


def test_damage_in_a_run_is_reported_and_hides_no_other_run(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "e"):
        make(tmp_path / name)
    (tmp_path / "a" / "result.json").write_text("{")
    (tmp_path / "b" / "config.yaml").write_text("model: [")
    (tmp_path / "c" / "sweep.json").write_bytes(b"\xff")
    (tmp_path / "d" / "environment.json").write_text("[]")
    records = by_path(tmp_path)
    assert [path for path, record in records.items() if record.problem] == ["a", "b", "c", "d"]
    assert (
        "result.json: not the result of a run: it is not JSON" in records["a"].problem
        and records["a"].status == "unfinished"
    )
    assert "config.yaml:2: not valid YAML" in records["b"].problem and records["b"].status == OK
    assert records["e"].problem == "" and set(index.read_index(tmp_path)) == {"e"}


def test_a_refused_run_shows_the_readable_settings(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a")
    run.path.mkdir()
    run.config_file.write_text("layout.tp: 3\nlayout.dp: many\ntraining.lr: 0.0006\nold.key: 1\n")
    run.write_result(Result("refused", "layout.tp: 3", 1.0, 1.0))
    record = by_path(tmp_path)["a"]
    assert record.settings == {"layout.tp": 3, "layout.dp": "many"} and record.problem == ""


def test_a_read_only_store_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a")
    monkeypatch.setattr("fugaku_gpt.jobs.store.file_system_time_ns", lambda folder: None)
    assert [record.run for record in list_runs(tmp_path).runs] == ["a"]
    assert not (tmp_path / index.FILE).exists()


def test_reindexing_reads_everything_and_removes_files_of_killed_writers(tmp_path: Path) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    old, new = tmp_path / "a" / ".result.json.0123.tmp", tmp_path / ".x.4567.tmp"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1e9, 1e9))
    listing, removed = reindex(tmp_path)
    assert (listing.runs, listing.read, removed) == (expected, 1, 1)
    assert not old.exists() and new.exists()


def test_links_are_not_followed_and_a_vanished_run_is_none(tmp_path: Path) -> None:
    make(tmp_path / "store" / "a")
    os.symlink(tmp_path / "store", tmp_path / "store" / "loop")
    assert list(by_path(tmp_path / "store")) == ["a"]
    assert read_record(tmp_path / "store", "gone") is None


def test_a_store_may_be_a_single_run(tmp_path: Path) -> None:
    make(tmp_path)
    records: List[RunRecord] = list_runs(tmp_path).runs
    assert [record.run for record in records] == ["."] and asdict(records[0])["status"] == OK
