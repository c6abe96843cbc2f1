"""``fugaku-gpt job render``: print the job script of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from fugaku_gpt.cli.options import PATH, run_source, scheduler_option, scheduler_overrides
from fugaku_gpt.cli.output import echo, echo_script
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.records.files import write_text_atomically


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
    from fugaku_gpt.jobs.run_job import job_of_run
    from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large

    config, chosen = job_of_run(source, scheduler_overrides(scheduler))
    refuse_job_too_large(config)
    script = render_from_files(config, chosen)
    for note in script.notes:
        echo(f"note: {note}", err=True)
    if out is None:
        echo_script(script.text)
    else:
        write_text_atomically(out, script.text)
