"""Options that several commands share, each declared once, and options that reach a command as one dataclass.

The configuration is imported where it is needed: ``--help`` of other commands must not wait for YAML.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple, Type, TypeVar

import click

Command = Callable[..., Any]
F = TypeVar("F", bound=Command)

PATH: "click.Path" = click.Path(path_type=Path)
FORMATS = ("table", "md", "csv", "json")


def options_as(kind: Type[Any], name: str = "options") -> Callable[[Command], Command]:
    """Pass the options whose names are fields of a dataclass as one instance of it, in the argument ``name``.

    It stands below the options that it gathers; every field must be an option or an argument of the command.
    """
    names = [spec.name for spec in fields(kind)]

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            gathered = kind(**{field: values.pop(field) for field in names})
            return function(**{name: gathered}, **values)

        return command

    return decorate


def run_source(
    *,
    metavar: str = "[RUN.yaml]",
    run_option: str = "",
    preset_flags: Tuple[str, ...] = ("--preset",),
    settings_help: str = "Override a setting, such as layout.tp=2; repeatable.",
) -> Callable[[Command], Command]:
    """Add ``[RUN.yaml] --preset --set`` to a command, which gets them as a
    :class:`fugaku_gpt.config.source.RunSource` in ``source``.

    Args:
        metavar: how the argument is shown in the usage line.
        run_option: an option for the run file, such as ``--run``, in place of the argument.
        preset_flags: names of the option for the preset.
        settings_help: help of ``--set``.
    """
    from fugaku_gpt.config import preset_names
    from fugaku_gpt.config.source import RunSource

    if run_option:
        run_file = click.option(run_option, "run_file", metavar="RUN.yaml", type=PATH, help="Run file to start from.")
    else:
        run_file = click.argument("run_file", metavar=metavar, required=False, type=PATH)
    preset_help = f"Preset to start from: {', '.join(preset_names())}."

    def decorate(function: Command) -> Command:
        command = options_as(RunSource, "source")(function)
        command = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=settings_help)(command)
        command = click.option(*preset_flags, "preset", metavar="NAME", help=preset_help)(command)
        return run_file(command)

    return decorate


def format_option(choices: Tuple[str, ...] = FORMATS, subject: str = "output") -> Callable[[F], F]:
    """Add ``--format``, which a command gets in ``form``.

    Args:
        choices: valid formats; the first one is the default.
        subject: what is printed, for the help.
    """
    return click.option(
        "--format",
        "form",
        type=click.Choice(choices),
        default=choices[0],
        show_default=True,
        help=f"Format of the {subject}.",
    )


def data_option(function: F) -> F:
    """Add ``--data``; see :func:`data_overrides`."""
    return click.option(
        "--data", metavar="PATH", help="Folder made by `data prepare`, or prefix of a .bin/.idx pair; sets data.paths."
    )(function)


def scheduler_option(help: str = "Scheduler of the job; sets job.scheduler.") -> Callable[[F], F]:
    """Add ``--scheduler``; see :func:`scheduler_overrides`."""
    from fugaku_gpt.config.schema import SCHEDULERS

    return click.option("--scheduler", type=click.Choice(SCHEDULERS), help=help)


def scheduler_overrides(scheduler: Optional[str]) -> List[str]:
    """The override that ``--scheduler`` stands for; none where it was not given."""
    return [f"job.scheduler={scheduler}"] if scheduler is not None else []


def checkpoint_option(function: Command) -> Command:
    """Add ``--checkpoint`` to a command that uses one checkpoint of a run."""
    return click.option(
        "--checkpoint",
        metavar="best|NAME",
        help="The run's checkpoint with the lowest loss (checkpoint.keep_best), or one by its name, such as "
        "step-00000100; default: the newest valid one.",
    )(function)


def data_overrides(data: Optional[str]) -> List[str]:
    """The override that ``--data`` stands for; none where it was not given."""
    return [f"data.paths=[{json.dumps(data)}]"] if data is not None else []


@dataclass(frozen=True)
class MachineChoice:
    """A machine of the cost model.

    Attributes:
        name: name of the machine, or its file.
        hardware: kind of its hardware; None for the first.
        build: series of PyTorch, such as 1.10; empty if none is given.
    """

    name: str
    hardware: Optional[str]
    build: str


def machine_choice(function: Command) -> Command:
    """Add ``--machine --hardware --torch`` to a command, which gets a :class:`MachineChoice` in ``machine_choice``."""
    command = options_as(MachineChoice, "machine_choice")(function)
    command = torch_option("PyTorch build, where the machine's rows distinguish builds.")(command)
    command = click.option(
        "--hardware", metavar="KIND", help="Kind of the machine's hardware, such as V100-16GB; default: the first."
    )(command)
    return click.option(
        "--machine",
        "name",
        default="a64fx",
        show_default=True,
        metavar="NAME",
        help="Machine, or its file; local is machine-local.yaml, which `plan probe` writes.",
    )(command)


def torch_option(help: str) -> Callable[[F], F]:
    """Add ``--torch``, which a command gets in ``build``."""
    return click.option("--torch", "build", default="", metavar="1.10", help=help)
