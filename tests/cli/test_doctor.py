"""``fugaku-gpt doctor`` of a machine and of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli import doctor as verb
from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.doctor.machine import FAIL, OK, WARN, Check
from tests.doctor.flights import write_flight
from tests.sweep.fake import leave_run


@pytest.mark.parametrize(("worst", "code"), [(OK, 0), (WARN, 0), (FAIL, 1)])
def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], worst: str, code: int
) -> None:
    def checks() -> List[Check]:
        return [Check("Python", OK, "3"), Check("mpirun", worst, "none", "install one")]

    monkeypatch.setattr(verb, "check_machine", checks)
    assert run(["doctor", "--format", "json"]) == code
    rows = json.loads(capsys.readouterr().out)
    assert rows[1] == {"name": "mpirun", "status": worst, "seen": "none", "mend": "install one"}


def test_a_run_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), status=None)
    for rank in range(2):
        write_flight(tmp_path / "run" / "flight", rank, 2, [("dp", "all_reduce", "a.py:7", False)][: 2 - rank])

    def told(form: str) -> str:
        assert run(["doctor", str(tmp_path / "run"), "--format", form]) == 0
        return capsys.readouterr().out

    assert told("table").startswith("result: no result: still running") and "a.py:7" in told("table")
    assert told("md").startswith("* result:") and "| ranks | call |" in told("md")
    assert told("csv").splitlines()[1].startswith("0-1,1,dp,all_reduce,4x8,a.py:7,inside,")
    assert json.loads(told("json"))["positions"][0]["ranks"] == [0, 1]


def test_a_foreign_folder_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
