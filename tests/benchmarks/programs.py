"""Calls benchmarks within this process: a start of Python and PyTorch for each call takes seconds, and the ranks and
contestants that they start are separate programs in any case."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, List

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:  # so that each finds the modules beside it
    sys.path.insert(0, str(BENCHMARKS))


def printed_lines(capfd: pytest.CaptureFixture[str], program: str, *arguments: str) -> List[str]:
    """The lines that ``benchmarks/PROGRAM.py`` prints to its standard output for these arguments; it must succeed."""
    capfd.readouterr()
    assert _main(program, arguments) in (None, 0)
    return capfd.readouterr().out.splitlines()


def refusal(capfd: pytest.CaptureFixture[str], program: str, *arguments: str) -> str:
    """The standard error of a benchmark that refuses its arguments with exit code 2 and prints no table."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        _main(program, arguments)
    captured = capfd.readouterr()
    assert stopped.value.code == 2 and not captured.out
    return captured.err


def _main(program: str, arguments: "tuple[str, ...]") -> Any:
    return importlib.import_module(program).main(list(arguments))
