"""Tests of commands in the documentation: the command line parses each, and marked ones print the shown output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import click
import pytest
from click.testing import CliRunner

from fugaku_gpt.cli.main import cli, run
from tests.docs.pages import (
    DOCS,
    EXAMPLES,
    ROOT,
    VARIABLE,
    Block,
    blocks_of,
    fugaku_gpt_calls,
    lay_out_examples,
    written_pages,
)

BLOCKS = [block for page in written_pages() for block in blocks_of(page)]
CALLS = sorted({call for block in BLOCKS for line in block.commands for call in fugaku_gpt_calls(line)})
RERUN = [block for block in BLOCKS if block.rerun]
MENTIONED = sorted(
    {
        match
        for page in written_pages()
        for match in re.findall(r"`fugaku-gpt ([a-z][^`\n]*)`", page.read_text(encoding="utf-8"))
    }
)
LANGUAGES = ("console", "sh", "text", "yaml", "python", "markdown", "json", "mermaid")


def _leaves(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _leaves(child)


@pytest.fixture
def inert_cli(monkeypatch: pytest.MonkeyPatch) -> click.Group:
    """The command line with commands that do nothing, so that only verbs, options and values are parsed."""
    for command in _leaves(cli):
        monkeypatch.setattr(command, "callback", lambda *_, **__: None)
    return cli


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(call)[:60])
def test_a_shown_command_is_parsed(call: Tuple[str, ...], inert_cli: click.Group) -> None:
    outcome = CliRunner().invoke(inert_cli, call)
    assert outcome.exit_code == 0 or "does not exist" in outcome.output, outcome.output


@pytest.mark.parametrize("mention", MENTIONED)
def test_a_mentioned_command_is_parsed(mention: str) -> None:
    call = re.sub(r"(?:--[a-z-]+ )?\b(NAME|DIR|TOPIC)\b.*", "", mention)  # else --help is the value of the option
    outcome = CliRunner().invoke(cli, [*shlex.split(call), "--help"])
    assert outcome.exit_code == 0, outcome.output


def test_every_verb_is_shown_somewhere() -> None:
    shown = {call[0] for call in CALLS if call}
    assert set(cli.list_commands(click.Context(cli))) <= shown


def test_every_code_block_has_a_valid_language() -> None:
    wrong = [(block.page, block.text[:40]) for block in BLOCKS if block.language not in LANGUAGES]
    assert not wrong


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.title], ids=lambda block: block.title)
def test_a_shown_file_equals_the_example(block: Block) -> None:
    assert block.text == (EXAMPLES / block.title).read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, and the benchmarks and profiles of the checkout."""
    lay_out_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.slow  # some plan for seconds
@pytest.mark.parametrize("block", RERUN, ids=lambda block: f"{Path(block.page).stem}: {block.commands[0][11:60]}")
def test_a_shown_output_is_printed_by_the_command(
    block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    for line in block.commands:
        (call,) = fugaku_gpt_calls(line)
        codes.append(run(call))
    assert codes == [0] * (len(codes) - 1) + [block.exit_code]
    captured = capsys.readouterr()
    printed = [VARIABLE.sub("", line).rstrip() for line in (captured.out + captured.err).splitlines()]
    shown = [VARIABLE.sub("", line).rstrip() for line in block.output if line not in ("...", "")]
    assert shown, block
    position = 0
    for line in shown:
        assert line in printed, line
        if line in printed[position:]:  # standard error comes last here, and first on some terminals
            position = printed.index(line, position)


def test_calls_are_extracted_from_pipes_launchers_and_substitutions() -> None:
    line = "mpirun -n 4 fugaku-gpt train a.yaml --out x 2> log | tail && fugaku-gpt runs ls  # fugaku-gpt doctor"
    assert fugaku_gpt_calls(line) == [("train", "a.yaml", "--out", "x"), ("runs", "ls")]
    assert fugaku_gpt_calls('eval "$(fugaku-gpt sim env)"') == [("sim", "env")]
    assert fugaku_gpt_calls("grep fugaku-gpt file") == []


def test_an_error_in_a_shown_command_is_detected(inert_cli: click.Group) -> None:
    for call in (["trian"], ["train", "--rank", "2"], ["train", "--ranks", "two"], ["data", "prepare", "texts"]):
        assert CliRunner().invoke(inert_cli, call).exit_code != 0


TARGETS = sorted(
    {
        target
        for page in written_pages()
        for target in re.findall(r"(?:`|^)make ([a-z][a-z0-9-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_shown_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


def test_benchmark_programs_that_are_shown_exist() -> None:
    shown = {
        match
        for page in written_pages()
        for match in re.findall(r"\bbenchmarks/[a-z_0-9/.-]+\.(?:py|yaml|csv|svg)\b", page.read_text(encoding="utf-8"))
    }
    assert shown and not [path for path in sorted(shown) if not (ROOT / path).exists()]


# The tutorial with a tenth of its iterations.
SHORTER = {"iterations: 60": "iterations: 6", "eval_interval: 30": "eval_interval: 3", "interval: 30}": "interval: 3}",
           "interval: 30,": "interval: 3,", "training.iterations=80": "training.iterations=8"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_the_tutorial_s_commands_work_in_sequence(folder: Path) -> None:
    program = folder / "bin" / "fugaku-gpt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fugaku_gpt "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment: Dict[str, str] = {
        **os.environ,
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
    }
    first = folder / "first.yaml"
    first.write_text(_shortened(first.read_text(encoding="utf-8")), encoding="utf-8")
    commands: List[Tuple[str, int]] = [
        (line, block.exit_code) for block in blocks_of(DOCS / "tutorial.md") for line in block.commands
    ]
    assert len(commands) > 10
    for line, exit_code in commands:
        done = subprocess.run(
            ["bash", "-ec", _shortened(line)], cwd=folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == exit_code, f"{line}\n{done.stdout.decode()}"


def _shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def test_commands_and_outputs_of_the_pages_are_extracted() -> None:
    """The parametrised tests above would pass with nothing to test if the pages' marks or fences were not parsed."""
    assert len(RERUN) >= 15 and len(CALLS) >= 50
