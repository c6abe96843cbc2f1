"""Tests of ``fugaku-gpt report runs``."""

from __future__ import annotations

from pathlib import Path

from fugaku_gpt.cli.main import run as command
from tests.report.page_runs import write_page_run
from tests.support.commands import Capture


def test_the_page_of_runs_is_written_and_counted(tmp_path: Path, capsys: Capture) -> None:
    for name in "ab":
        write_page_run(tmp_path / "runs" / name, lines=3)
    page = tmp_path / "report.html"
    assert command(["report", "runs", str(tmp_path / "runs"), "--format", "html", "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: 2 runs, {page.stat().st_size / 1000:.0f} kB\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_other_formats_and_folders_without_runs_are_refused(tmp_path: Path, capsys: Capture) -> None:
    page = str(tmp_path / "report.html")
    assert command(["report", "runs", str(tmp_path), "--format", "csv", "-o", page]) == 2
    assert "'csv' is not 'html'" in capsys.readouterr().err
    assert command(["report", "runs", str(tmp_path), "-o", page]) == 2
    assert "holds no run directory" in capsys.readouterr().err
    assert not Path(page).exists()
