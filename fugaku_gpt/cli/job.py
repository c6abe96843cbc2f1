"""``fugaku-gpt job``: write, check, submit, follow and collect jobs."""

from __future__ import annotations

import click

from fugaku_gpt.cli.lazy import LazyGroup

COMMANDS = {
    "cancel": "fugaku_gpt.cli.job_follow:cancel",
    "collect": "fugaku_gpt.cli.job_collect:collect",
    "hold": "fugaku_gpt.cli.job_follow:hold",
    "lint": "fugaku_gpt.cli.job_lint:lint",
    "logs": "fugaku_gpt.cli.job_follow:logs",
    "parse": "fugaku_gpt.cli.job_parse:parse",
    "release": "fugaku_gpt.cli.job_follow:release",
    "render": "fugaku_gpt.cli.job_render:render",
    "resume": "fugaku_gpt.cli.job_follow:resume",
    "status": "fugaku_gpt.cli.job_follow:status",
    "submit": "fugaku_gpt.cli.job_follow:submit",
    "watch": "fugaku_gpt.cli.job_follow:watch",
}


@click.group(cls=LazyGroup, commands_at=COMMANDS)
def job() -> None:
    """Write job scripts for PJM, Slurm or this machine, check them, hand them in, follow and collect them."""
