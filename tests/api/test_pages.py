"""Tests of pages of runs by the interface: the same as by the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fugaku_gpt import api
from fugaku_gpt.cli.main import run as command
from tests.report.page_runs import write_page_run


def test_the_page_is_that_of_the_command_and_so_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("a", 1e-3), ("b", 2e-3)):
        write_page_run(tmp_path / "runs" / name, lines=3, lr=lr)
    runs = api.Runs(tmp_path / "runs").where("training.lr > 0.0015")
    written = api.write_run_page([runs.directory(record).path for record in runs], tmp_path / "api.html")
    assert (written.runs, written.size, written.points) == (1, (tmp_path / "api.html").stat().st_size, 0)
    assert command(["report", "runs", str(tmp_path / "runs" / "b"), "-o", str(tmp_path / "command.html")]) == 0
    by_api, by_command = (
        re.sub('"made":"[^"]*"', "", (tmp_path / f"{name}.html").read_text()) for name in ("api", "command")
    )
    assert by_api == by_command
    with pytest.raises(api.UsageError) as error:
        api.write_run_page([str(tmp_path / "none")], "page.html")
    capsys.readouterr()
    assert command(["report", "runs", str(tmp_path / "none"), "-o", "page.html"]) == 2
    assert capsys.readouterr().err == f"fugaku-gpt: {error.value}\n"
