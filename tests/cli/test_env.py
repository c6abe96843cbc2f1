"""``fugaku-gpt env``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run

HERE = f"name: here\npython: {sys.executable}\n"


def test_the_list_tells_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "list", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch-1.7"]["pytorch"] == "1.7.1" and rows["torch-1.7"]["python"] == "3.8"
    assert rows["a64fx-torch-1.13"]["made"] == "by a job" and rows["a64fx-torch-1.13"]["where"] == "in a tar file"
    assert "CUDA" in rows["torch-1.13"]["note"]
    assert run(["env", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "pytorch", "python", "where", "made", "note"]


@pytest.mark.parametrize(("expected", "code"), [("{}", 0), ("{torch: 0.1}", 3)])
def test_a_difference_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: str, code: int
) -> None:
    (tmp_path / "here.yaml").write_text(f"{HERE}expected: {expected}\n", encoding="utf-8")
    assert run(["env", "check", str(tmp_path / "here.yaml"), "--format", "json"]) == code
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["PyTorch"]["status"] == ("differs" if code else "not stated")
    assert rows["PyTorch"]["mend"] == (f"fugaku-gpt env create {tmp_path}/here.yaml --again" if code else None)


def test_a_build_in_a_tar_file_gets_its_job_and_its_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["env", "create", "a64fx-torch-1.10", "--set", "job.group=hp000000"]) == 0
    out = capsys.readouterr().out
    assert "cd build-a64fx-torch-1.10 && pjsub build.sh" in out
    assert f"job.tarball={tmp_path}/build-a64fx-torch-1.10/a64fx-torch-1.10.tar" in out
    script = (tmp_path / "build-a64fx-torch-1.10" / "build.sh").read_text(encoding="utf-8")
    assert "module load lang/tcsds" in (tmp_path / "build-a64fx-torch-1.10" / "activate.sh").read_text(encoding="utf-8")
    assert run(["env", "recipe", "a64fx-torch-1.10", "--set", "job.group=hp000000"]) == 0
    assert capsys.readouterr().out == script
    assert run(["env", "recipe", "a64fx-torch-1.10", "--package", "/vol0004/our.whl"]) == 0
    assert " install --no-cache-dir /vol0004/our.whl\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check", "torch-1.8"], "no profile has this name; did you mean"),
        (["check", "a64fx-torch-1.7"], "say where: --at FOLDER"),
        (
            ["check", "torch-1.7", "--at", "nowhere"],
            "the environment is not made: fugaku-gpt env create torch-1.7 --at nowhere",
        ),
        (["create", "a64fx-torch-1.7", "--python", "python3"], "is compiled by a job"),
        (["create", "torch-1.7", "--set", "job.group=x"], "is installed by pip, not by a job"),
        (["create", "torch-1.7", "--at", "new", "--pip-args", "'"], "--pip-args ': No closing quotation"),
        (["recipe", "torch-1.7"], "is installed by pip, not compiled"),
    ],
)
def test_a_slip_is_exit_code_2_and_says_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: "list[str]", told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["env", *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_such_python_is_said_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pins.txt").write_text("tiny==1\n", encoding="utf-8")
    (tmp_path / "old.yaml").write_text("python: v/bin/python\npins: pins.txt\npython_version: 3.99\n", encoding="utf-8")
    assert run(["env", "create", str(tmp_path / "old.yaml")]) == 2
    assert "no Python 3.99 on PATH and none in pyenv" in capsys.readouterr().err and not (tmp_path / "v").exists()


def test_a_profile_without_pins_is_nothing_to_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here.yaml").write_text(HERE, encoding="utf-8")
    assert run(["env", "create", str(tmp_path / "here.yaml")]) == 2
    assert "its profile names no pins: there is nothing to make" in capsys.readouterr().err
