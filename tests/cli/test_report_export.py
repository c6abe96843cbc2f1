"""Tests of ``fugaku-gpt report export``."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.report.export import COLUMNS
from tests.sweep.fake import ITERATIONS, leave_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        leave_run(tmp_path / "runs" / name, load_run_config(preset="tiny"))
    return tmp_path / "runs"


def test_csv_goes_to_standard_output_or_into_a_file(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "export", str(runs), "--to", "csv"]) == 0
    text = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["run"] for row in rows] == ["a"] * (ITERATIONS + 2) + ["b"] * (ITERATIONS + 2)
    assert [row["loss"] for row in rows if row["run"] == "a"] == ["7.0", "6.0", "5.0", "4.0", "8.0", "4.5"]
    file = runs.parent / "metrics.csv"
    assert run(["report", "export", str(runs / "a"), str(runs / "b"), "--to", "csv", "-o", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == text and capsys.readouterr().out == ""


def test_parquet_and_event_files_need_a_place(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "export", str(runs), "--to", "parquet"]) == 2
    assert "--to parquet: needs -o FILE" in capsys.readouterr().err
    assert run(["report", "export", str(runs), "--to", "tensorboard"]) == 2
    assert "--to tensorboard: needs -o FOLDER" in capsys.readouterr().err


def test_event_files_of_each_run_have_a_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs.parent / "events"
    assert run(["report", "export", str(runs), "--to", "tensorboard", "-o", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out / "a"), str(out / "b")]
    assert [path.name for path in sorted((out / "a").iterdir())] == ["by_tokens", "events.out.tfevents.0000000001"]


@pytest.mark.parametrize("form", ["csv", "parquet", "tensorboard"])
def test_mistakes_are_single_lines(form: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    missing, out = runs / "none", runs / "a" / "config.yaml" / "out"
    assert run(["report", "export", str(missing), "--to", form, "-o", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"fugaku-gpt: {missing}: no such folder")
    assert run(["report", "export", str(runs), "--to", form, "-o", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written: Not a directory" in line or "cannot be written: File exists" in line
