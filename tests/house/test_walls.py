"""Tests of the two walls at run time: what login and compute nodes import. Import contracts check the text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

import pytest

from fugaku_gpt.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]

# SystemExit, not ImportError: an `except ImportError` around an optional import must not hide it.
WALL = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if any(name == part or name.startswith(part + ".") for part in {forbidden!r}):
            raise SystemExit("imports " + name)

sys.meta_path.insert(0, Wall())
"""
LOGIN_NODE = ["torch", "mpi4py", "tokenizers"]
COMPUTE_NODE = [
    "jinja2",
    "matplotlib",
    "rich",
    "scipy",
    "tokenizers",
    "fugaku_gpt.data.prepare",
    "fugaku_gpt.data.tokenizer",
    "fugaku_gpt.records.tensorboard",
    "fugaku_gpt.report",
    "fugaku_gpt.sweep",
]
# all that `train` imports on a rank, some of it late
RANK = (
    "import fugaku_gpt.cli.train, fugaku_gpt.launch.rank_supervisor, "
    "fugaku_gpt.planner.trainer.memory_check, fugaku_gpt.training.run"
)


@pytest.mark.slow
def test_top_level_help_stays_behind_the_login_node_wall() -> None:
    output = _python(LOGIN_NODE, _RUN.format(arguments=["--help"]))
    assert "Train GPT models" in output
    assert all(name in output for name in COMMANDS)


@pytest.fixture(scope="module")
def help_texts() -> Dict[str, str]:
    """Returns command to output of ``--help`` of it and of all verbs below it, from one interpreter behind the wall."""
    output = _python(
        LOGIN_NODE,
        """
import click
from fugaku_gpt.cli.main import COMMANDS, cli, run

def verbs(command, arguments):
    yield arguments
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from verbs(command.get_command(context, name), arguments + [name])

for name in sorted(COMMANDS):
    print("=== " + name, flush=True)
    for arguments in verbs(cli.get_command(click.Context(cli), name), [name]):
        assert run(arguments + ["--help"]) == 0, arguments
""",
    )
    texts = re.split(r"^=== (.*)$", output, flags=re.MULTILINE)[1:]
    return dict(zip(texts[::2], texts[1::2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_verb_stays_behind_the_login_node_wall(name: str, help_texts: Dict[str, str]) -> None:
    assert f"Usage: fugaku-gpt {name}" in help_texts[name]


@pytest.mark.slow
def test_a_sweep_is_expanded_behind_the_login_node_wall() -> None:
    sweep_file = str(ROOT / "benchmarks" / "sweeps" / "demo.yaml")
    assert _python(LOGIN_NODE, _RUN.format(arguments=["sweep", "expand", sweep_file]))


@pytest.mark.slow  # imports PyTorch
def test_training_stays_behind_the_compute_node_wall_and_imports_no_launcher() -> None:
    starts_ranks = [f"fugaku_gpt.launch.{name}" for name in ("launcher", "launch_result", "processes")]
    _python([*COMPUTE_NODE, *starts_ranks, "fugaku_gpt.environments"], RANK)


@pytest.mark.slow
def test_no_library_has_begun_threads_when_a_rank_forks_from_the_supervisor() -> None:
    _python(
        [*COMPUTE_NODE, "torch", "mpi4py", "numpy"], "import fugaku_gpt.cli.train, fugaku_gpt.launch.rank_supervisor"
    )


def test_the_package_itself_imports_nothing() -> None:
    loaded = _python([], "import sys, fugaku_gpt; print([n for n in sys.modules if n.startswith('fugaku_gpt.')])")
    assert loaded.strip() == "[]"


@pytest.mark.slow
def test_the_wall_of_this_test_stops_an_import() -> None:
    with pytest.raises(AssertionError, match="imports (torch|mpi4py)"):
        _python(LOGIN_NODE, "import fugaku_gpt.comm")


_RUN = "from fugaku_gpt.cli.main import run; assert run({arguments!r}) == 0"


def _python(forbidden: List[str], text: str) -> str:
    """Output of a fresh interpreter in which the forbidden packages cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", WALL.format(forbidden=forbidden) + text],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
