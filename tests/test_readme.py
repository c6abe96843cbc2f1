"""The README's commands exist, with the verbs and options that they are shown with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import List

import pytest
from click.testing import CliRunner

from fugaku_gpt.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown_commands() -> List[str]:
    """Every ``fugaku-gpt ...`` line of the README's code, less ``mpirun``'s words."""
    lines = re.findall(r"^(?:    |\$ )(?:mpirun -n \d+ )?(fugaku-gpt .*)$", README, re.MULTILINE)
    return [line.split("  #")[0] for line in lines]


@pytest.mark.parametrize("line", shown_commands())
def test_a_shown_command_is_understood(line: str) -> None:
    told = CliRunner().invoke(cli, [*shlex.split(line)[1:], "--help"])  # verbs and options are looked up before it
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|    )make ([a-z][a-z0-9-]+)", README))))
def test_a_shown_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


@pytest.mark.parametrize(
    "path", re.findall(r"\]\(([^)#:]+)\)", README) + ["benchmarks/step.py", "benchmarks/sweeps/demo.yaml"]
)
def test_a_shown_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


PLANS = {
    "plan memory benchmarks/runs/fugaku-1.3b.yaml --set": "$ fugaku-gpt plan memory",
    "plan time benchmarks/runs/fugaku-1.3b.yaml": "figure ",
    "plan topology --model 1.3b": "rank  nodes  ppn",
}


@pytest.mark.parametrize(("command", "head"), PLANS.items(), ids=lambda words: words[:12])
def test_what_plans_are_shown_to_tell_is_what_they_tell(
    command: str, head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (line,) = [line for line in shown_commands() if command in line]
    (shown,) = [
        block for block in re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if block.startswith(head)
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    told = CliRunner().invoke(cli, shlex.split(line)[1:]).output.splitlines()
    wanted = [
        one for one in shown.splitlines() if one != "..." and not one.startswith("$ ") and "layouts meet" not in one
    ]
    timing = re.compile(r"; [\d.]+ s$")  # how long it took
    told, wanted = ([timing.sub("", one).rstrip() for one in lines] for lines in (told, wanted))
    places = [told.index(one) for one in wanted]
    assert places == sorted(places)
