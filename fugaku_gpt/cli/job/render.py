"""``fugaku-gpt job render``: the job script of a run, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Optional, Tuple, TypeVar

import click

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.schema import SCHEDULERS
from fugaku_gpt.records.files import write_text_atomically

F = TypeVar("F", bound=Callable[..., object])

scheduler_option: Callable[[F], F] = click.option(
    "--scheduler", type=click.Choice(SCHEDULERS), help="Who runs the job; sets job.scheduler."
)


@click.command()
@click.argument("run_file", metavar="[RUN.yaml]", required=False, type=click.Path(path_type=Path))
@click.option("--preset", help="Start from a preset, such as 124m.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override, such as job.nodes=384.")
@scheduler_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the script to this file instead of printing it.")
def render(
    run_file: Optional[Path],
    preset: Optional[str],
    settings: Tuple[str, ...],
    scheduler: Optional[str],
    out: Optional[Path],
) -> None:
    """Print the job script of RUN.yaml, a preset and overrides; hand in nothing.

    A run that its nodes have too little memory for is refused. What the scheduler has no words for, and what was chosen
    for you, is told on standard error and stands in the script as comments. job.template names a template of your own,
    which may override blocks of those in jobscripts/.
    """
    from fugaku_gpt.jobs.render import render_from_files
    from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large

    config = job_config(run_file, preset, settings, scheduler)
    refuse_job_too_large(config)
    script = render_from_files(config)
    for note in script.notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(script.text, nl=False)
    else:
        write_text_atomically(out, script.text)


def job_config(
    run_file: Optional[Path], preset: Optional[str], settings: Tuple[str, ...], scheduler: Optional[str]
) -> RunConfig:
    """The run that a command line describes, its profile as the path of a file that exists."""
    from fugaku_gpt.environments.registry import with_profile_file

    overrides: List[str] = [*settings, *([f"job.scheduler={scheduler}"] if scheduler is not None else [])]
    return with_profile_file(load_run_config(run_file, preset, overrides), run_file)
