"""Runs a command of ``fugaku-gpt`` in this process and reads what it prints."""

from __future__ import annotations

import json
from typing import Any, Sequence

import pytest

from fugaku_gpt.cli.main import run

Capture = pytest.CaptureFixture[str]


def json_of(capsys: Capture, *arguments: str, codes: Sequence[int] = (0,)) -> Any:
    """The JSON that a command prints; its exit code must be one of these."""
    capsys.readouterr()
    code = run([*arguments, "--format", "json"])
    captured = capsys.readouterr()
    assert code in codes, captured.err
    return json.loads(captured.out)
