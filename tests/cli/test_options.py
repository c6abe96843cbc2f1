"""Tests of options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Tuple

import click
import pytest
from click.testing import CliRunner

from fugaku_gpt.cli.options import (
    data_overrides,
    format_option,
    options_as,
    run_source,
    scheduler_option,
    scheduler_overrides,
)
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import ConfigError


def parsed_options(decorators: List[Any], arguments: List[str]) -> Any:
    """The options that a command with these decorators, the topmost first, gets from a command line."""
    values: List[Any] = []

    def record_options(**options: Any) -> None:
        values.append(options)

    function: Any = record_options
    for decorator in reversed(decorators):
        function = decorator(function)
    result = CliRunner().invoke(click.command()(function), arguments)
    assert result.exit_code == 0, result.output
    return values[0]


@dataclass(frozen=True)
class Limits:
    """Two options."""

    nodes: int
    pairs: Tuple[str, ...]


def test_grouped_options_are_a_dataclass_and_the_rest_stay_separate() -> None:
    decorators = [
        click.option("--nodes", type=int),
        click.option("--pairs", multiple=True),
        click.option("--plot"),
        options_as(Limits, "limits"),
    ]
    arguments = ["--nodes", "4", "--pairs", "a", "--pairs", "b", "--plot", "x.svg"]
    assert parsed_options(decorators, arguments) == {"limits": Limits(4, ("a", "b")), "plot": "x.svg"}


def test_a_field_without_an_option_is_a_mistake_of_the_command() -> None:
    result = CliRunner().invoke(click.command()(options_as(Limits)(click.option("--nodes")(lambda options: None))), [])
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    ("options", "arguments", "source"),
    [
        ({}, [], RunSource(None, None, ())),
        ({}, ["r.yaml", "--preset", "tiny"], RunSource(Path("r.yaml"), "tiny", ())),
        ({}, ["--set", "a.b=1", "--set", "c.d=2"], RunSource(None, None, ("a.b=1", "c.d=2"))),
        ({"run_option": "--run"}, ["--run", "r.yaml"], RunSource(Path("r.yaml"), None, ())),
        ({"preset_flags": ("--model", "--preset")}, ["--model", "1.3b"], RunSource(None, "1.3b", ())),
    ],
)
def test_a_run_comes_from_a_file_a_preset_and_overrides(options: Any, arguments: List[str], source: RunSource) -> None:
    assert parsed_options([run_source(**options)], arguments) == {"source": source}


def test_overrides_of_a_command_win_over_those_of_the_user() -> None:
    source = RunSource(None, "tiny", ("layout.tp=2", "training.iterations=3"))
    config = source.load("training.iterations=4")
    assert (config.layout.tp, config.training.iterations) == (2, 4)
    assert source.load().training.iterations == 3


def test_a_run_that_does_not_fit_together_is_loaded_where_it_is_not_checked() -> None:
    source = RunSource(None, "tiny", ("layout.tp=3",))
    with pytest.raises(ConfigError, match="layout.tp"):
        source.load()
    assert source.load(check=False).layout.tp == 3


def test_the_first_format_is_the_default() -> None:
    assert parsed_options([format_option(("json", "table"))], []) == {"form": "json"}
    assert parsed_options([format_option(("json", "table"))], ["--format", "table"]) == {"form": "table"}


def test_data_and_scheduler_stand_for_overrides() -> None:
    assert parsed_options([scheduler_option()], ["--scheduler", "slurm"]) == {"scheduler": "slurm"}
    assert scheduler_overrides("slurm") == ["job.scheduler=slurm"] and scheduler_overrides(None) == []
    assert data_overrides('a "b"') == ['data.paths=["a \\"b\\""]'] and data_overrides(None) == []
