"""The last lines of a run's log: where it is, and the command that goes with its end."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import List

from fugaku_gpt.config import RunConfig
from fugaku_gpt.records.claim import HOLDER_VARIABLE
from fugaku_gpt.records.run import RunDirectory


def closing_lines(directory: RunDirectory, is_exportable: bool = True) -> List[str]:
    """Return the lines for a run that has done all of its iterations: its directory, its last checkpoint, and the next
    command. ``is_exportable``: whether other programs have its model, too."""
    run, checkpoint = shlex.quote(str(directory.path)), directory.last_checkpoint()
    if not checkpoint:
        return [f"run directory: {run}; no checkpoint was asked for", f"next: fugaku-gpt report table {run}"]
    export = f"fugaku-gpt ckpt export {run} {shlex.quote(str(directory.path) + '-hf')}"
    return [
        f"run directory: {run}; last checkpoint: {checkpoint}",
        f"next: {export if is_exportable else f'fugaku-gpt report table {run}'}",
    ]


def resume_command(directory: Path, config: RunConfig, with_ranks: bool) -> str:
    """Return the command that resumes a run that has stopped.

    Args:
        with_ranks: whether that command starts the ranks; else it is what a launcher is to start.
    """
    run = shlex.quote(str(directory))
    ranks = f" --ranks {config.layout.ranks}" if with_ranks else ""
    return f"fugaku-gpt train {run}/config.yaml --out {run} --resume auto{ranks}"


def starts_ranks(config: RunConfig) -> bool:
    """True if the command that started this run has started its ranks."""
    return config.layout.ranks > 1 and HOLDER_VARIABLE in os.environ
