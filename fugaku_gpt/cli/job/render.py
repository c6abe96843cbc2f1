"""``fugaku-gpt job render``: print the job script of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

import click

from fugaku_gpt.cli.options import PATH, run_source, scheduler_option, scheduler_overrides
from fugaku_gpt.cli.output import echo, echo_script
from fugaku_gpt.config.source import RunSource
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

    config, chosen = training_job(source, scheduler)
    refuse_job_too_large(config)
    script = render_from_files(config, chosen)
    for note in script.notes:
        echo(f"note: {note}", err=True)
    if out is None:
        echo_script(script.text)
    else:
        write_text_atomically(out, script.text)


def training_job(source: RunSource, scheduler: Optional[str]) -> "Tuple[RunConfig, List[str]]":
    """Load the run that a command line describes, with its profile as the path of a file that exists.

    Vocabulary and validation are those of its corpora where it states none, as with `train`; notes say so. A corpus
    that cannot be read here decides nothing.
    """
    from fugaku_gpt.data.corpus_settings import with_corpus_settings
    from fugaku_gpt.environments.registry import with_profile_file
    from fugaku_gpt.errors import DataError

    overrides = scheduler_overrides(scheduler)
    config = source.load(*overrides)
    notes: List[str] = []
    with contextlib.suppress(DataError):  # the job's notes name it, and it is not submitted
        config, notes = with_corpus_settings(source, config, overrides)
    return with_profile_file(config, source.run_file), notes
