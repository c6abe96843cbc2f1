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
from tests.doctor.flights import Ranks
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


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), status=None)
    ranks = Ranks(tmp_path / "run" / "flight", 2, {"dp": [(0, 1)]})
    ranks.progress((0, 1), step=5)
    ranks.call((0,), "dp", "a.py:7", returns=False)
    return tmp_path / "run"


def test_what_happened_to_a_run(hanging: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(hanging)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("result: no result: still running") and lines[1].startswith("last: iteration 4")
    assert lines[2].startswith("rank 1 is the cause") and "a.py:7" in lines[2]
    assert run(["doctor", "--format", "json", str(hanging)]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0] == lines[2]


def test_who_is_the_cause_of_a_hang(hanging: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "hang", str(hanging)]) == 3
    out = capsys.readouterr().out
    assert out.startswith("rank 1 is the cause: it is busy outside MPI") and "ranks that wait for others:" in out
    assert run(["doctor", "hang", str(hanging), "--format", "json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["hang"]["culprits"] == [1] and told["hang"]["positions"][1]["absent"] == [1]
    assert told["hang"]["call"]["site"] == "a.py:7" and told["hang"]["others"] == []


def test_a_foreign_folder_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor", str(tmp_path)], ["doctor", "hang", str(tmp_path)]):
        assert run(words) == 2
        assert "not a run directory" in capsys.readouterr().err
