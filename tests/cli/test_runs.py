"""Tests of ``fugaku-gpt runs``."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.records.index import FILE
from fugaku_gpt.records.job import append_event
from fugaku_gpt.records.run import OK, Result, RunDirectory
from tests.support.job_records import record_submission
from tests.sweep.fake import leave_run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for name, dp, status, pace in (("s/a", 1, OK, 0.5), ("s/b", 2, OK, 0.25), ("c", 4, "oom", 2.0)):
        config = load_run_config(
            preset="tiny", overrides=[f"layout.dp={dp}", "job.elapse=1:30:00", "training.seed=7", "node.tcmalloc=yes"]
        )
        leave_run(folder / name, config, status, "" if status == OK else "killed by the kernel", pace)
    leave_run(folder / "s" / "attempts" / "b" / "1", load_run_config(preset="tiny"), "timeout", "ended after 0:01:00")
    return folder


def list_runs(store: Path, capsys: pytest.CaptureFixture[str], *options: str) -> List[Dict[str, Any]]:
    assert run(["runs", "ls", str(store), "--format", "json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return rows


def run_names(rows: List[Dict[str, Any]]) -> List[str]:
    return [row["run"] for row in rows]


def test_runs_of_all_folders_are_listed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list_runs(store, capsys)
    assert run_names(rows) == ["c", "s/a", "s/b"]
    assert rows[0]["status"] == "oom" and rows[0]["reason"] == "killed by the kernel" and rows[0]["layout.dp"] == 4
    assert rows[1]["seconds_per_iteration"] == 0.5 and rows[1]["job"] is None
    assert run_names(list_runs(store, capsys, "--attempts")) == ["c", "s/a", "s/attempts/b/1", "s/b"]
    assert run_names(list_runs(store / "s", capsys)) == ["a", "b"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ('status == "ok"', ["s/a", "s/b"]),
        ("layout.dp * layout.tp >= 2 and seconds_per_iteration < 1", ["s/b"]),
        ("layout.ranks == 4 or layout.dp == 1", ["c", "s/a"]),
        ("job.elapse == 1:30:00 and training.seed in (7, 8)", ["c", "s/a", "s/b"]),
        ("node.tcmalloc and job.volumes == ()", ["c", "s/a", "s/b"]),
        ("'kernel' in reason", ["c"]),
        ("job != ''", []),
    ],
)
def test_filters_take_columns_and_settings(
    store: Path, capsys: pytest.CaptureFixture[str], condition: str, expected: List[str]
) -> None:
    assert run_names(list_runs(store, capsys, "--where", condition)) == expected


def test_sorting_and_columns(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_names(list_runs(store, capsys, "--sort", "seconds_per_iteration")) == ["s/b", "s/a", "c"]
    assert run_names(list_runs(store, capsys, "--sort=-layout.dp,run")) == ["c", "s/b", "s/a"]
    assert run_names(list_runs(store, capsys, "--sort", "status,-run")) == ["s/b", "s/a", "c"]
    RunDirectory(store / "fresh").create("model.layers: 2\n")
    assert run_names(list_runs(store, capsys, "--sort=-seconds_per_iteration"))[-1] == "fresh"  # no value: sorted last
    rows = list_runs(store, capsys, "--columns", "run,layout.ranks,node.preload,job.elapse")
    assert rows[0] == {"run": "c", "layout.ranks": 4, "node.preload": None, "job.elapse": 5400.0}


def test_runs_on_grids_have_a_column_of_images(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("images_per_second" in row for row in list_runs(store, capsys))
    file = store / "s" / "b" / "result.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    result["summary"].update(images_per_second=32.5, last_validation_accuracy=0.25)
    file.write_text(json.dumps(result), encoding="utf-8")
    for _ in range(2):  # read, and then from the index
        rows = list_runs(store, capsys, "--sort=-images_per_second")
        assert [(row["run"], row["images_per_second"]) for row in rows] == [("s/b", 32.5), ("c", None), ("s/a", None)]
        names = list(rows[0])
        assert names[names.index("images_per_second") - 1] == "seconds_per_iteration"
    rows = list_runs(store, capsys, "--columns", "run,last_validation_accuracy")
    assert [list(row.values()) for row in rows] == [["c", None], ["s/a", None], ["s/b", 0.25]]


def test_every_format(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "ls", str(store), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["started"] for row in rows] == ["1700000000.0"] * 3  # raw values
    assert run(["runs", "ls", str(store)]) == 0
    table = capsys.readouterr().out
    assert "2023-11-14 22:13:20 UTC" in table and table.splitlines()[2].startswith("c  ")
    assert run(["runs", "ls", str(store), "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("| run | status |")


def test_damage_is_reported_beside_the_table(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "c" / "result.json").write_text("{")
    assert run(["runs", "ls", str(store)]) == 0
    captured = capsys.readouterr()
    assert "unfinished" in captured.out and "note: " in captured.err
    assert "c/result.json: not the result of a run: it is not JSON" in captured.err


def test_show_prints_a_run_in_full(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "c"
    record_submission(path, "12", "slurm")
    append_event(path, "status", 1.7e9, job_id="12", state="ended", raw="OUT_OF_MEMORY")
    assert run(["runs", "show", str(path), "--format", "json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["run"]["status"] == "oom" and description["preset"]["name"] == "tiny"
    assert description["settings"]["layout.dp"] == {"value": 4, "default": 1}
    assert description["settings"]["training.seed"] == {"value": 7, "default": 1234}
    assert "model.layers" not in description["settings"]  # as in the preset
    assert "slurm" in description["jobs"]["12"] and description["jobs"]["verdict"].startswith("oom: ")
    assert description["environment"]["git_commit"] == "0123abc"
    assert run(["runs", "show", str(path)]) == 0
    table = capsys.readouterr().out
    assert "layout.dp" in table and "4 (default 1)" in table and "toggles.tcmalloc" in table


def test_a_refused_run_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("layout.tp: 3\n")
    RunDirectory(tmp_path).write_result(Result("refused", "layout.tp: 3: must divide", 1.0, 1.0))
    assert run(["runs", "show", str(tmp_path)]) == 0
    assert "must divide model.heads" in capsys.readouterr().out


def test_reindex_reports_runs_and_damage(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / FILE).write_text("nonsense")
    (store / "c" / "sweep.json").write_text("nonsense")
    assert run(["runs", "reindex", str(store)]) == 0
    captured = capsys.readouterr()
    assert "4 runs, 1 of them damaged" in captured.out and "c/sweep.json: not a sweep entry" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "ls", "none"], "none: no such folder"),
        (["runs", "show", "."], "not a run directory"),
        (["runs", "reindex", "none"], "none: no such folder"),
        (
            ["runs", "ls", ".", "--where", "stats == 'ok'"],
            "--where: \"stats == 'ok'\", character 1: unknown name stats",
        ),
        (["runs", "ls", ".", "--sort", "stats"], "--sort stats: unknown name; did you mean status?"),
        (["runs", "ls", ".", "--columns", "run,layout.dq"], "unknown name; did you mean layout.dp?"),
        (["runs", "ls", ".", "--columns=-run"], "--columns -run: unknown name; did you mean run?"),
    ],
)
def test_mistakes_are_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: List[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_expression_that_cannot_be_evaluated_names_the_run(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "ls", str(store), "--where", "node.freq_mhz > 2000"]) == 2
    assert "null (not set) and the number 2000 have no order (in c)" in capsys.readouterr().err
