"""Tests of the command line without the work of any command: help, version, exit codes and error messages."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import List

import pytest

from fugaku_gpt import __version__
from fugaku_gpt.cli.main import COMMANDS, run


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_and_is_exit_code_0(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    output = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in output
    assert "Exit codes: 0 ok, 1 a run failed, 2 usage or config error, 3 findings" in " ".join(output.split())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: fugaku-gpt {command}")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["--colour"], "No such option"),
        (["train", "--ranks", "0"], "--ranks"),
        (["train", "--ranks", "many"], "--ranks"),
        (["report", "table"], "Missing argument"),
        (["report", "table", "--format", "xml", "."], "xml"),
        (["data", "prepare", "x.txt"], "--out"),
        (["sweep", "launch"], "No such command 'launch'"),
    ],
)
def test_a_mistake_on_the_command_line_is_exit_code_2(
    arguments: List[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_each_line_of_a_configuration_error_is_printed_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--set", "training.lr=fast", "--set", "layout.tpp=2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["fugaku-gpt", "fugaku-gpt"]
    assert "training.lr: 'fast'" in lines[0] and "did you mean layout.tp?" in lines[1]


@pytest.mark.slow
def test_a_command_line_without_arguments_prints_the_help() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "fugaku_gpt"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert b"Usage: fugaku-gpt" in completed.stdout and b"Traceback" not in completed.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
@pytest.mark.slow
def test_a_closed_output_pipe_is_no_failure(arguments: List[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "fugaku_gpt", *arguments], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert completed.returncode == 0 and completed.stderr == b""


@pytest.mark.slow
def test_the_shell_completes_commands_and_options() -> None:
    environment = {**os.environ, "_FUGAKU_GPT_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    for command_line, completion in (("fugaku-gpt job su", "submit"), ("fugaku-gpt train --res", "--resume")):
        completed = subprocess.run(
            [sys.executable, "-m", "fugaku_gpt"],
            env={**environment, "COMP_WORDS": command_line},
            capture_output=True,
            check=True,
        )
        assert f"plain,{completion}" in completed.stdout.decode().split()
