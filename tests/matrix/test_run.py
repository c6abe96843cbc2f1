"""Tests of the program that runs parts of the suite on builds: it counts as pytest does, and reports skipped builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.matrix import run
from tests.matrix.run import Result, pairs_table, table

TESTS = """
import pytest

pytestmark = pytest.mark.slow

def test_good(): print("2 ranks: 7 passed, 1 skipped in 1.00s")

@pytest.mark.skip
def test_skipped(): pass

def test_bad(): assert 1 == 2
"""


def profile(folder: Path, name: str, python: str) -> str:
    file = folder / f"{name}.yaml"
    file.write_text(f"name: {name}\npython: {python}\n")
    return str(file)


@pytest.mark.slow
def test_counts_of_a_build_and_skipped_builds_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "test_some.py"
    part.write_text(TESTS)
    builds = [profile(tmp_path, "this", sys.executable), profile(tmp_path, "absent", "no/such/python")]
    arguments = [str(part), "--out", str(tmp_path / "out"), "--builds", *builds]
    for more in ([], ["--resume"]):
        assert run.main([*arguments, *more]) == 1
        output = capsys.readouterr().out
        assert "=== SKIPPED: absent: " in output and "env create absent" in output
        assert "1/1/1 " in output.splitlines()[-3] and "tests passed by number of ranks: 7 on 2" in output
        assert ("assert 1 == 2" in output) == (not more)


@pytest.mark.slow
def test_a_pytest_that_cannot_collect_is_a_failure(tmp_path: Path) -> None:
    part = tmp_path / "test_broken.py"
    part.write_text("import no_such_module\n")
    arguments = [str(part), "--out", str(tmp_path / "out"), "--builds", profile(tmp_path, "this", sys.executable)]
    assert run.main(arguments) == 1


def test_the_tables_have_the_expected_lines() -> None:
    results = {"a": {"x": Result(3, 0, 1, 2.4)}, "b": {"x": Result(2, 1, 1, 1.2)}}
    assert table(results) == [
        "passed/failed/skipped  a          b",
        "x                      3/0/1 2 s  2/1/1 1 s",
        "all                    3/0/1 2 s  2/1/1 1 s",
    ]
    line: Dict[str, Any] = {"from": "a", "case": "float32", "layout": "", "loss": 5e-7, "norm": 0.0, "problems": []}
    lines = [line, {**line, "loss": 2e-6, "problems": ["too far"]}]
    assert pairs_table({"b": json.loads(json.dumps(lines))}) == [
        "checkpoints of  in b",
        "a               1 of 2 resume, 2.00 of the tolerance",
    ]
