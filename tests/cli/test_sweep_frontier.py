"""Tests of ``fugaku-gpt sweep frontier``: with the real trainer under a limit of memory, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import List

import numpy as np
import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.data.indexed import IndexedWriter
from fugaku_gpt.launch.processes import marked_processes
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.sweep.lock import SweepLock
from tests.sweep.test_frontier import FakeNode, up_to

RUN = """
model: {layers: 2, hidden: 256, heads: 4, seq_len: 512, vocab_size: 256, vocab_multiple: 8, name: mini}
data: {paths: [DATA], split: [80, 19, 1]}
node: {threads_per_rank: 1, memory_limit: 410Mi}
"""
BULLET = re.compile(
    r"- global batch size (\d+), recompute=(\w+), (\w+)(?:, \w+=\w+)*: "
    r"(?:~ ([\d.]+) samples/s, ~ ([\d.]+) tokens/s|OOM|refused)(?: \([a-z, ]+\))?"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    prefix = tmp_path / "bytes"
    text = np.frombuffer(Path(os.__file__).read_bytes(), dtype=np.uint8).astype(np.uint16)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for start in range(0, 20_000, 1000):
            writer.add_document(text[start : start + 1000])
    path = tmp_path / "mini.yaml"
    path.write_text(RUN.replace("DATA", str(prefix)), encoding="utf-8")
    return path


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_search_ends_at_the_limit_of_memory_and_leaves_no_rank(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: List[str] = []
    enter = SweepLock.__enter__
    monkeypatch.setattr(SweepLock, "__enter__", lambda lock: (marks.append(lock.mark), enter(lock))[1])
    out = tmp_path / "out"
    search = ["sweep", "frontier", str(file), "--out", str(out), "--iterations", "2", "--most", "32"]
    search += ["--matrix", "layout.dp=1", "--matrix", "layout.tp=1,3"]
    assert run(search) == 0
    captured = capsys.readouterr()
    assert marked_processes(marks[0]) == []
    rows = json.loads((out / "frontier.json").read_text(encoding="utf-8"))
    largest = rows[0]["largest"]
    assert 1 <= largest < 32 and rows[0]["above"].endswith(": OOM") and rows[1]["above"] == "1: refused"
    ended = RunDirectory(out / f"dp1-tp1-mbs{rows[0]['above'].split(':')[0]}-r1").result()
    assert ended is not None and "MiB in use" in ended.reason and "(limit: node.memory_limit)" in ended.reason
    bullets = [line for line in captured.out.splitlines() if line.startswith("- ")]
    assert len(bullets) == sum(row["trials"] for row in rows) and all(map(BULLET.fullmatch, bullets))
    (marked,) = [line for line in bullets if "largest" in line]
    assert marked.startswith(f"- global batch size {largest}, recompute=none, float32, dp=1, tp=1: ~ ")
    assert "mini model, Sequence Length=512" in captured.out and ", OOM" in captured.out
    assert (out / "frontier.md").read_text(encoding="utf-8").startswith(bullets[0])
    results = {path: path.stat().st_mtime_ns for path in out.glob("dp1-tp1*/result.json")}
    assert run([*search, "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == rows and captured.err.count("kept: ") == len(results)
    assert {path: path.stat().st_mtime_ns for path in out.glob("dp1-tp1*/result.json")} == results


def test_the_table_has_the_trials_of_this_search_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fugaku_gpt.launch.launcher.launch", FakeNode(up_to(2)))
    monkeypatch.setattr("fugaku_gpt.launch.launcher.find_launcher", lambda: None)
    monkeypatch.setattr("fugaku_gpt.launch.launcher.require_rank_packages", lambda: None)
    out = tmp_path / "out"
    search = ["sweep", "frontier", "--preset", "tiny", "--out", str(out), "--most", "3", "--set"]
    search += ["node.memory_limit=900Mi", "--over", "training.micro_batch", "--until", "oom"]
    for matrix, combinations in (("training.recompute=none,full", 2), ("training.recompute=full", 1)):
        assert run([*search, "--matrix", matrix]) == 0
        table, edges = ((out / f"{name}.csv").read_text(encoding="utf-8") for name in ("table", "frontier"))
        assert (len(edges.splitlines()) - 1, len(table.splitlines()) - 1) == (combinations, 3 * combinations)
    assert "full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheduler", "pjm"], "--scheduler pjm: the search runs on this machine only"),
        (["--over", "training.lr"], "'training.lr' is not 'training.micro_batch'"),
        (["--until", "diverged"], "'diverged' is not 'oom'"),
        (["--most", "0"], "0 is not in the range"),
        (["--matrix", "training.dtype"], "expected FIELD=V1,V2"),
        (["--plot", "a.jpg"], "must end in .svg or .png"),
        (["--set", "node.memory_guard=no"], "node.memory_guard: false"),
    ],
)
def test_a_field_that_cannot_be_searched_is_refused_by_name(
    arguments: List[str], message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "frontier", str(file), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "out").exists()


def test_a_run_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "frontier", "--out", str(tmp_path / "out")]) == 2
    assert "name a RUN.yaml, or a --preset" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_first(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fugaku_gpt.plotting.find_spec", lambda name: None)
    arguments = ["sweep", "frontier", str(file), "--out", str(tmp_path / "out"), "--plot", str(tmp_path / "a.svg")]
    assert run(arguments) == 2
    assert "pip install 'fugaku_gpt[plot]'" in capsys.readouterr().err and not (tmp_path / "out").exists()
