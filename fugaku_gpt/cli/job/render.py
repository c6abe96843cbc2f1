"""``fugaku-gpt job render``: print the job script of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Optional

import click

from fugaku_gpt.cli.options import PATH, RunSource, run_source, scheduler_option, scheduler_overrides
from fugaku_gpt.records.files import write_text_atomically

if TYPE_CHECKING:
    from fugaku_gpt.config import RunConfig


@click.command()
@run_source(settings_help="Override a setting, such as job.nodes=384; repeatable.")
@scheduler_option()
@click.option("--out", type=PATH, help="Write the script to this file instead of printing it.")
def render(source: RunSource, scheduler: Optional[str], out: Optional[Path]) -> None:
    """Print the job script for RUN.yaml, a preset and overrides; nothing is submitted.

    A run that does not fit into the memory of its nodes is refused. Settings that the scheduler cannot express, and
    values that were chosen for you, are reported on standard error and as comments in the script. job.template names a
    template of your own, which may override blocks of those in jobscripts/.
    """
    from fugaku_gpt.jobs.render import render_from_files
    from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large

    config = job_config(source, scheduler)
    refuse_job_too_large(config)
    script = render_from_files(config)
    for note in script.notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(script.text, nl=False)
    else:
        write_text_atomically(out, script.text)


def job_config(source: RunSource, scheduler: Optional[str]) -> "RunConfig":
    """Load the run that a command line describes, with its profile as the path of a file that exists."""
    from fugaku_gpt.environments.registry import with_profile_file

    return with_profile_file(source.load(*scheduler_overrides(scheduler)), source.run_file)
