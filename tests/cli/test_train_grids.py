"""Tests of ``fugaku-gpt train`` on grids: from the command to the table, and resumed in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import EXIT_USAGE
from fugaku_gpt.records.run import RunDirectory
from tests.support.grids import SETTINGS, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]


def train(folder: Path, out: str, ranks: int, *more: str, resume: str = "") -> RunDirectory:
    """Trains on generated tasks, and returns the run directory."""
    file = write_tasks(folder / "tasks.json")
    settings = (*SETTINGS, "training.iterations=6", "training.decay_iterations=6", "training.dtype=float64", *more)
    options: List[str] = [word for text in settings for word in ("--set", text)]
    options += ["--resume", str(folder / resume)] if resume else []
    assert run(["train", "--data", str(file), *options, "--ranks", str(ranks), "--out", str(folder / out)]) == 0
    return RunDirectory(folder / out)


def test_a_run_has_images_per_second_in_result_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = train(tmp_path, "run", 1)
    result = directory.result()
    assert result is not None
    summary = result.summary
    assert summary["images_per_second"] == pytest.approx(8 / summary["seconds_per_iteration"])
    assert "last_validation_accuracy" in summary and "compile_seconds" in summary
    assert "next: fugaku-gpt report table" in capsys.readouterr().out
    assert run(["report", "table", str(directory.path), "--format", "md"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "| images/s | Validation loss |" in table[1] and f"| {summary['images_per_second']:.4g} |" in table[3]
    assert "| buckets 4+7, " in table[3] or ", buckets 4+7" in table[3]
    assert run(["report", "table", str(directory.path), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["images_per_second"] == summary["images_per_second"]
    assert run(["generate", str(directory.path), "--prompt", "x"]) == EXIT_USAGE
    assert "its model is a grid_classifier" in capsys.readouterr().err
    assert run(["ckpt", "export", str(directory.path), str(tmp_path / "exported")]) == EXIT_USAGE
    assert "none of their models classifies grids" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_is_resumed_in_another_layout_has_the_curve_of_an_uninterrupted_run(tmp_path: Path) -> None:
    everything = train(tmp_path, "all", 1).metrics("iteration")
    first = train(tmp_path, "first", 2, "layout.tp=2", "training.iterations=3").metrics("iteration")
    layout = ("layout.pp=2", "layout.schedule=zero_bubble")
    rest = train(tmp_path, "rest", 2, *layout, resume="first").metrics("iteration")
    assert len(everything) == 6
    for ours, theirs in zip(everything, first + rest):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        for name in ("iteration", "accuracy", "actual_seq_len"):
            assert ours[name] == theirs[name]
