"""``fugaku-gpt report table`` in its four forms."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from tests.sweep.fake import leave_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, pace in (("a", 0.25), ("b", 0.75)):
        leave_run(tmp_path / name, load_run_config(preset="tiny", overrides=["layout.dp=2"]), pace=pace)
    leave_run(tmp_path / "c", load_run_config(preset="tiny"), "oom", "MemoryError")
    return tmp_path


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["report", "table", *arguments]) == 0
    return capsys.readouterr().out


def test_markdown_is_the_notes_form(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table(capsys, str(runs), "--format", "md")
    assert text.splitlines()[0] == "### 1.1M model, Sequence Length=128, PyTorch 2.13"
    assert text.splitlines()[3].startswith("| 1 | 1.1M | 1 | 1 | 1 | 4 | 16 | 1028.0 MiB | 0.500 | ")
    assert text.splitlines()[3].endswith(" | 11-14, OOM |")
    assert text.splitlines()[4].endswith(" | 11-14, n=2 |")
    assert table(capsys, str(runs), "--format", "md") == text


def test_csv_and_json_carry_raw_values_with_units(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(table(capsys, str(runs), "--format", "json"))
    merged = rows[1]
    assert merged["seconds_per_iteration"] == 0.5 and merged["torch_build"] == "2.13.0+cpu"
    assert [repeat["seconds_per_iteration"] for repeat in merged["repeats"]] == [0.25, 0.75]
    assert merged["tflops_per_node_exact"] > merged["tflops_per_node_notes"] > 0
    assert merged["runs"] == [str(runs / "a"), str(runs / "b")] and merged["git_commit"] == "0123abc"
    assert rows[0]["status"] == "oom" and rows[0]["reason"] == "MemoryError"
    (_, line) = csv.DictReader(io.StringIO(table(capsys, str(runs), "--format", "csv")))
    assert float(line["seconds_per_iteration"]) == 0.5 and line["rss_max_bytes_per_rank"] == str(2**28)
    assert line["freq_mhz_applied"] == "" and line["first_validation_loss"] == "8.0"


def test_the_terminal_form_shows_the_validation_loss(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(capsys, str(runs)).splitlines()
    assert lines[0] == "1.1M model, Sequence Length=128, PyTorch 2.13"
    assert "8.000 to 4.500" in lines[3] and max(len(line) for line in lines) <= 140


def test_si_divides_by_a_thousand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "big", load_run_config(preset="tiny", overrides=["model.name=big"]), pace=1e-8)

    def petaflops(*options: str) -> float:
        return float(table(capsys, str(tmp_path), "--format", "md", *options).splitlines()[-1].split(" | ")[10])

    assert petaflops("--si") / petaflops() == pytest.approx(1.024, rel=1e-3)


def test_no_runs_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "table", str(tmp_path)]) == 2
    assert "holds no run directory" in capsys.readouterr().err
    assert run(["report", "table"]) == 2
