"""``fugaku-gpt job``: write, check, submit, follow and collect jobs."""

from __future__ import annotations

import click

from fugaku_gpt.cli.lazy import LazyGroup

COMMANDS = {
    "cancel": "fugaku_gpt.cli.job.follow:cancel",
    "collect": "fugaku_gpt.cli.job.collect:collect",
    "hold": "fugaku_gpt.cli.job.follow:hold",
    "lint": "fugaku_gpt.cli.job.lint:lint",
    "logs": "fugaku_gpt.cli.job.follow:logs",
    "parse": "fugaku_gpt.cli.job.parse:parse",
    "release": "fugaku_gpt.cli.job.follow:release",
    "render": "fugaku_gpt.cli.job.render:render",
    "resume": "fugaku_gpt.cli.job.submit:resume",
    "status": "fugaku_gpt.cli.job.follow:status",
    "submit": "fugaku_gpt.cli.job.submit:submit",
    "watch": "fugaku_gpt.cli.job.follow:watch",
}


@click.group(cls=LazyGroup, commands_at=COMMANDS)
def job() -> None:
    """Write job scripts for PJM, Slurm or this machine; check, submit, follow and collect jobs."""
