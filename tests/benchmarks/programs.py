"""Benchmarks called within this process: a start of Python and PyTorch for each call takes seconds, and the ranks and
contestants that they start are programs of their own in any case."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, List

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:  # where each of them finds the modules beside it
    sys.path.insert(0, str(BENCHMARKS))


def printed_lines(capfd: pytest.CaptureFixture[str], program: str, *words: str) -> List[str]:
    """The lines that ``benchmarks/PROGRAM.py`` prints to its standard output for these arguments; it must succeed."""
    capfd.readouterr()
    assert _main(program, words) in (None, 0)
    return capfd.readouterr().out.splitlines()


def refusal(capfd: pytest.CaptureFixture[str], program: str, *words: str) -> str:
    """What a benchmark prints to standard error for arguments that it refuses with exit code 2; it prints no table."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        _main(program, words)
    captured = capfd.readouterr()
    assert stopped.value.code == 2 and not captured.out
    return captured.err


def _main(program: str, words: "tuple[str, ...]") -> Any:
    return importlib.import_module(program).main(list(words))
