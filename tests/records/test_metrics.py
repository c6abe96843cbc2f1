"""Tests of readers of metrics files in which lines are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.metrics import read_sound_lines

SOUND = [{"kind": "iteration", "iteration": 1, "loss": 7.5}, {"kind": "resumed", "iteration": 1, "checkpoint": None}]


def write(path: Path, texts: List[str]) -> Path:
    path.write_text("".join(text + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    "damage",
    [
        '{"kind": "resumed", "checkpoint": "x"}',
        '{"kind": "iteration", "iteration": "5"}',
        '{"kind": "iteration", "iteration": 2, "loss": "low"}',
        '{"kind": "iteration", "iteration": 2, "loss": NaN}',
        '{"kind": "left_out", "grad_norm": Infinity}',
        '{"kind": "iter',
        "[1]",
    ],
)
def test_damaged_lines_are_counted_and_sound_lines_read(tmp_path: Path, damage: str) -> None:
    first, second = map(json.dumps, SOUND)
    assert read_sound_lines(write(tmp_path / "m", [first, damage, second])) == (SOUND, 1)
    assert read_sound_lines(write(tmp_path / "m", [first, second, damage])) == (SOUND, 0)  # a kill cuts the last


def test_no_file_has_no_lines_and_a_pipe_is_refused(tmp_path: Path) -> None:
    assert read_sound_lines(tmp_path / "none") == ([], 0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: cannot be read"):
        read_sound_lines(tmp_path / "pipe")
