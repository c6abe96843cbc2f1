"""The command line before any verb does its work: help, versions, exit codes, how mistakes are told."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import List

import pytest

from fugaku_gpt import __version__
from fugaku_gpt.cli.main import COMMANDS, run


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_verb_and_ends_well(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    shown = capsys.readouterr().out
    for verb in COMMANDS:
        assert f"\n  {verb} " in shown
    assert "Exit codes: 0 ok, 1 a run failed, 2 usage or config error, 3 findings" in " ".join(shown.split())


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: fugaku-gpt {verb}")


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_a_slip_on_the_command_line_is_exit_code_2(
    words: List[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_each_line_of_a_config_error_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--set", "training.lr=fast", "--set", "layout.tpp=2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["fugaku-gpt", "fugaku-gpt"]
    assert "training.lr: 'fast'" in lines[0] and "did you mean layout.tp?" in lines[1]


@pytest.mark.slow
def test_no_words_at_all_show_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fugaku_gpt"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert b"Usage: fugaku-gpt" in done.stdout and b"Traceback" not in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_failure(words: List[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fugaku_gpt", *words], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 0 and done.stderr == b""


def test_the_shell_completes_verbs_and_options() -> None:
    asked = {**os.environ, "_FUGAKU_GPT_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    for typed, completion in (("fugaku-gpt job su", "submit"), ("fugaku-gpt train --res", "--resume")):
        done = subprocess.run(
            [sys.executable, "-m", "fugaku_gpt"],
            env={**asked, "COMP_WORDS": typed},
            capture_output=True,
            check=True,
        )
        assert f"plain,{completion}" in done.stdout.decode().split()
