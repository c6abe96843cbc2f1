"""Renders the job of ``doctor node``, which measures the nodes that it gets."""

from __future__ import annotations

from typing import Sequence

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.jobs.missing import missing_needs
from fugaku_gpt.jobs.render import JobScript, profile_of, render_job

TEMPLATE = "node_report.sh.j2"


def render_node_report(config: RunConfig, arguments: Sequence[str]) -> JobScript:
    """Render the job that measures its nodes and leaves the report in its folder.

    Args:
        config: the run whose step is timed; its ``job`` section describes the job.
        arguments: of ``fugaku-gpt doctor node`` in the job, besides run, folder and the command that starts ranks.

    Raises:
        ConfigError: the scheduler cannot express the job, or it is a chain or has sub-jobs.
    """
    if config.job.chain != 1 or config.job.bulk:
        raise ConfigError("job.chain and job.bulk: nodes are measured by one job; leave them out")
    notes = missing_needs(config, trains=False)
    extra_values = {"node_arguments": list(arguments)}
    return render_job(config, profile_of(config), name=TEMPLATE, extra_values=extra_values, notes=notes)
