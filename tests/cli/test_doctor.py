"""Tests of ``fugaku-gpt doctor`` for a machine and for a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli import doctor as doctor_command
from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.doctor.machine import FAIL, OK, WARN, Check
from fugaku_gpt.machine.system import System, use_system
from tests.doctor.flights import Ranks
from tests.sweep.fake import leave_run


@pytest.mark.parametrize(("worst", "code"), [(OK, 0), (WARN, 0), (FAIL, 1)])
def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], worst: str, code: int
) -> None:
    def checks() -> List[Check]:
        return [Check("Python", OK, "3"), Check("mpirun", worst, "none", "install one")]

    monkeypatch.setattr(doctor_command, "check_machine", checks)
    assert run(["doctor", "--format", "json"]) == code
    rows = json.loads(capsys.readouterr().out)
    assert rows[1] == {"name": "mpirun", "status": worst, "seen": "none", "mend": "install one"}


@pytest.fixture
def hanging_run(tmp_path: Path) -> Path:
    leave_run(tmp_path / "run", load_run_config(preset="tiny"), status=None)
    ranks = Ranks(tmp_path / "run" / "flight", 2, {"dp": [(0, 1)]})
    ranks.progress((0, 1), step=5)
    ranks.call((0,), "dp", "a.py:7", returns=False)
    ranks.stand_still(40.0)
    return tmp_path / "run"


def test_doctor_reports_the_state_of_a_run(hanging_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(hanging_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("result: no result: still running") and lines[1].startswith("last: iteration 4")
    assert lines[2].startswith("rank 1 is the cause") and "a.py:7" in lines[2]
    assert run(["doctor", "--format", "json", str(hanging_run)]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0] == lines[2]


def test_doctor_hang_names_the_culprit(hanging_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "hang", str(hanging_run)]) == 3
    output = capsys.readouterr().out
    assert output.startswith("rank 1 is the cause: it is busy outside MPI") and "ranks that wait for others:" in output
    assert run(["doctor", "hang", str(hanging_run), "--format", "json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["hang"]["culprits"] == [1] and report["hang"]["positions"][1]["absent"] == [1]
    assert "not compared with the plan of a step: config.yaml is another run" in output
    assert report["hang"]["not_compared"].startswith("config.yaml is another run's")
    assert report["hang"]["call"]["site"] == "a.py:7" and report["hang"]["others"] == []


def test_an_empty_argument_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", ""]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_that_is_no_run_directory_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["doctor", str(tmp_path)], ["doctor", "hang", str(tmp_path)]):
        assert run(arguments) == 2
        assert "not a run directory" in capsys.readouterr().err


def test_doctor_clean_leaves_files_in_a_container_and_reports_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, namespace = tmp_path / "dev" / "shm", tmp_path / "proc" / "self" / "ns" / "pid"
    for folder in (memory, namespace.parent):
        folder.mkdir(parents=True)
    segment = memory / "mpich_shm_a1_0"
    segment.write_bytes(bytes(2**20))
    os.utime(segment, (1.0, 1.0))
    namespace.symlink_to("pid:[4026532211]")  # of a container
    with use_system(System(tmp_path)):
        assert run(["doctor", "clean"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{memory}: 0 files of dead ranks removed, 0 MiB" and segment.exists()
        assert lines[1].startswith("1 files are left, which may be in use: this is a container")
        assert lines[1].endswith(f"rm {segment}")
        namespace.unlink()  # a kernel without containers
        assert run(["doctor", "clean"]) == 0
        assert capsys.readouterr().out == f"{memory}: 1 files of dead ranks removed, 1 MiB\n"
