"""Tests of the picture of a run's losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loss_curve import draw
from fugaku_gpt.records.run import RunDirectory

pytest.importorskip("matplotlib", reason="matplotlib is not installed: make dev")


@pytest.mark.slow
def test_the_picture_has_both_losses_and_is_the_same_each_time(tmp_path: Path) -> None:
    lines = [{"kind": "iteration", "iteration": number, "loss": 5.0 / number} for number in range(1, 5)]
    lines += [{"kind": "validation", "iteration": number, "loss": 6.0 / number} for number in (2, 4)]
    directory = RunDirectory(tmp_path)
    directory.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name in ("a.svg", "b.svg"):
        draw(tmp_path, tmp_path / name)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert all(word in text for word in ("training", "validation", "iteration"))
