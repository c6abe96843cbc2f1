"""Tests that the run store is listed as it is after kills, moves and damage, whatever the index says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs import store
from fugaku_gpt.jobs.store import RunRecord, list_runs, read_record, reindex
from fugaku_gpt.records import index
from fugaku_gpt.records.job import append_event
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import OK, Result, RunDirectory
from fugaku_gpt.records.sweep import SweepEntry, write_sweep_entry
from tests.support.job_records import record_submission
from tests.sweep.fake import leave_run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = load_run_config(preset="tiny", overrides=["layout.dp=2"])


@pytest.fixture(autouse=True)
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once; a coarse clock has a separate test."""
    monkeypatch.setattr(store, "is_settled", lambda newest_ns, since_ns: True)


def by_path(store: Path) -> Dict[str, RunRecord]:
    return {record.run: record for record in list_runs(store).runs}


def indexed_runs(store: Path) -> List[str]:
    """The runs in the index of a store."""
    if not (store / index.FILE).exists():
        return []
    lines = (store / index.FILE).read_bytes().split(b"\n")[1:]
    return [json.loads(line.partition(b"\t")[0])[0] for line in lines if line]


def tick(folder: Path) -> None:
    """Return when the clock of the file system has moved."""
    before = index.file_system_time_ns(folder)
    assert before is not None
    while index.file_system_time_ns(folder) == before:
        pass


def make(path: Path, status: str = OK) -> RunDirectory:
    leave_run(path, CONFIG, status)
    return RunDirectory(path)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, pytest.param(80, marks=pytest.mark.long)])
def test_kills_lose_no_acknowledged_step(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.jobs.store_kills", str(tmp_path / "runs"), str(kills), "7"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300)
    counts = json.loads(done.stdout)
    assert counts["kills"] >= kills and counts["missing"] == [] and counts["damaged"] == []
    assert counts["index agrees"]
    assert counts["from the index"] > 0 or kills < 80  # a few kills may leave no time for an index
    assert counts["acknowledged"] > kills and counts["continued"] > 0 and counts["rounds of reading"] > 0


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
    assert indexed_runs(tmp_path) == ["c"]


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
    assert indexed_runs(tmp_path) == []


@pytest.mark.parametrize("spoil", ["cut", "flip", "other version", "not JSON", "a folder", "nested", "empty", "first"])
def test_a_damaged_index_is_no_error_and_is_ignored(tmp_path: Path, spoil: str) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    file = tmp_path / index.FILE
    content = file.read_bytes()
    if spoil == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif spoil == "flip":
        file.write_bytes(content.replace(b'"ok"', b'"oom"'))
    elif spoil == "other version":
        file.write_bytes(content.replace(b'"version": 2', b'"version": 3', 1))
    elif spoil == "not JSON":
        file.write_bytes(b"\xff\x00\n\x01")
    elif spoil == "nested":
        file.write_bytes(b"[" * 100_000)
    elif spoil == "first":  # as the first version wrote it
        body = json.dumps({"a": [{"config.yaml": [1, 2, 3]}, {"run": "a", "status": "oom"}]})
        head = {"kind": "index of runs", "version": 1, "sha256": hashlib.sha256(body.encode()).hexdigest()}
        file.write_text(f"{json.dumps(head)}\n{body}")
    elif spoil == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.mkdir()
    listing = list_runs(tmp_path)
    assert listing.runs == expected and listing.read == 1
    if spoil != "a folder":
        assert list_runs(tmp_path).read == 0


def test_an_index_of_another_program_version_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    with monkeypatch.context() as other:
        other.setattr(store, "_schema", lambda: "a digest of other defaults")
        assert list_runs(tmp_path) == (expected, 1) and list_runs(tmp_path) == (expected, 0)
    assert list_runs(tmp_path) == (expected, 1)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({3: 5}, id="status"),
        pytest.param({13: "many"}, id="iterations"),
        pytest.param({14: 1e300}, id="started"),
        pytest.param({14: None}, id="no start"),
        pytest.param({-1: [1.0]}, id="too few figures"),
        pytest.param({-1: [["x"]] * 10}, id="figures"),
        pytest.param({-1: None}, id="no figures"),
        pytest.param({0: 7}, id="path"),
        pytest.param({1: "x"}, id="files"),
        pytest.param({1: -1}, id="other files"),
        pytest.param({2: 5}, id="fingerprint"),
    ],
)
def test_a_forged_line_with_a_right_checksum_is_ignored(tmp_path: Path, values: Dict[int, Any]) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    head, _, body = (tmp_path / index.FILE).read_bytes().partition(b"\n")
    fields = json.loads(body.partition(b"\t")[0])
    for position, value in values.items():
        fields[position] = value
    forged = json.dumps(fields).encode() + b"\t" + body.partition(b"\t")[2]
    first = {**json.loads(head), "sha256": hashlib.sha256(forged).hexdigest()}
    (tmp_path / index.FILE).write_bytes(json.dumps(first).encode() + b"\n" + forged)
    assert list_runs(tmp_path) == (expected, 1)
    assert list_runs(tmp_path) == (expected, 0)


def changed_in_place(run: Path) -> None:
    """Change the result without a change of its size, inode or time."""
    stat = (run / "result.json").stat()
    text = (run / "result.json").read_text()
    with open(run / "result.json", "r+") as stream:
        stream.write(text.replace('"iterations": 4', '"iterations": 5'))
    os.utime(run / "result.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(run: Path) -> None:
    """Replace the result by another file of its size and time."""
    stat = (run / "result.json").stat()
    text = (run / "result.json").read_text()
    (run / "new").write_text(text.replace('"iterations": 4', '"iterations": 5'))
    os.utime(run / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(run / "new", run / "result.json")


def folder_replaced(run: Path) -> None:
    """Move the run away, and a changed copy of it, with all its times, to where it was."""
    shutil.copytree(run, run.parent / ".copy")
    for path in (run, *run.iterdir()):
        copy = run.parent / ".copy" / path.relative_to(run)
        if path.name == "result.json":
            copy.write_text(path.read_text().replace('"iterations": 4', '"iterations": 5'))
        os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    run.rename(run.parent / ".before")
    (run.parent / ".copy").rename(run)


def swapped(run: Path) -> None:
    """Swap the names of two runs."""
    run.rename(run.parent / ".first")
    (run.parent / "b").rename(run)
    (run.parent / ".first").rename(run.parent / "b")


@pytest.mark.parametrize("change", [changed_in_place, replaced, folder_replaced, swapped])
def test_a_change_that_keeps_sizes_and_times_is_seen(tmp_path: Path, change: Callable[[Path], None]) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", "oom")
    assert list_runs(tmp_path).read == 2
    tick(tmp_path)
    assert list_runs(tmp_path).read == 0
    change(tmp_path / "a")
    listing = list_runs(tmp_path)
    assert listing.runs == list_runs(tmp_path, use_index=False).runs and listing.read > 0
    assert (listing.runs[0].iterations, listing.runs[0].status) != (4, OK)


def test_files_that_come_and_go_are_seen(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    assert list_runs(tmp_path).read == 1
    write_sweep_entry(run.path, SweepEntry("demo", "a-r1", "a", 0, 1, "0123", "2.2GHz"))
    assert by_path(tmp_path)["a"].sweep == "demo"
    (run.path / "sweep.json").unlink()
    assert by_path(tmp_path)["a"].sweep == ""
    make(run.path / "attempts" / "1")
    assert list(by_path(tmp_path)) == ["a", "a/attempts/1"]
    make(run.path / "attempts" / "2", "oom")
    assert [record.status for record in list_runs(tmp_path).runs] == [OK, OK, "oom"]
    assert list_runs(tmp_path).read == 0
    (run.path / "result.json").unlink()
    assert by_path(tmp_path)["a"].status == "unfinished"
    run.config_file.unlink()  # then it is a folder like others
    assert list(by_path(tmp_path)) == ["a/attempts/1", "a/attempts/2"]


def test_a_clock_that_was_set_back_makes_the_index_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a")
    expected = list_runs(tmp_path).runs
    assert list_runs(tmp_path) == (expected, 0)
    present = index.file_system_time_ns(tmp_path)
    assert present is not None
    monkeypatch.setattr(store, "file_system_time_ns", lambda folder: present - 3600 * 10**9)
    assert list_runs(tmp_path) == (expected, 1)


def test_files_of_the_future_are_not_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "is_settled", index.is_settled)
    monkeypatch.setattr(index, "TICK_NS", 0)
    run = make(tmp_path / "a")
    os.utime(run.path / "result.json", (4e9, 4e9))
    tick(tmp_path)
    assert list_runs(tmp_path).read == 1 and list_runs(tmp_path).read == 1


def test_paths_that_depend_on_where_the_store_is_are_not_indexed(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny", overrides=["data.paths=[corpus]"])
    for name in ("begun", "written"):
        leave_run(tmp_path / "runs" / name, config)
        (tmp_path / "runs" / name / "corpus").mkdir()
    for claim in (tmp_path / "runs" / "written").glob(".claim.*"):
        claim.unlink()
    assert list_runs(tmp_path / "runs").read == 2 and indexed_runs(tmp_path / "runs") == ["begun"]
    (tmp_path / "runs").rename(tmp_path / "moved")
    listing = list_runs(tmp_path / "moved")
    assert listing.runs == list_runs(tmp_path / "moved", use_index=False).runs
    assert listing.runs[1].settings["data.paths"] == [str(tmp_path / "moved" / "written" / "corpus")]


def test_runs_share_settings_and_each_line_of_the_index_is_complete(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make(tmp_path / name)
    assert list_runs(tmp_path).read == 3
    runs = list_runs(tmp_path).runs
    assert runs[0].settings is runs[1].settings is runs[2].settings and runs[0].settings["layout.dp"] == 2
    shutil.rmtree(tmp_path / "a")
    assert list_runs(tmp_path) == (runs[1:], 0) == list_runs(tmp_path)


def test_a_change_within_a_tick_of_the_clock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "is_settled", index.is_settled)
    monkeypatch.setattr(index, "TICK_NS", 10**12)  # nothing of this test is ever old enough
    run = make(tmp_path / "a")
    assert list_runs(tmp_path).read == 1 and list_runs(tmp_path).read == 1
    changed_in_place(run.path)
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
    assert records["e"].problem == "" and indexed_runs(tmp_path) == ["e"]


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
    assert [record.run for record in records] == ["."] and records[0].status == OK
    assert list_runs(tmp_path).read == 0
