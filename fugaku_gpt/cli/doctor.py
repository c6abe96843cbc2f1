"""``fugaku-gpt doctor``: what is wrong with this machine, or with a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Optional

import click

from fugaku_gpt.cli.output import format_option, render_rows
from fugaku_gpt.doctor.machine import FAIL, check_machine
from fugaku_gpt.doctor.run import Diagnosis, diagnose, rank_words
from fugaku_gpt.errors import RunFailed


@click.command()
@click.argument("run_directory", metavar="[RUN_DIR]", required=False, type=click.Path(path_type=Path))
@format_option
def doctor(run_directory: Optional[Path], form: str) -> None:
    """Check whether this machine can train; with RUN_DIR, tell what happened to that run.

    Of a run that hangs or died it says which MPI call each rank was in, and which ranks are behind. Exit code 1 if a
    check of the machine fails.
    """
    if run_directory is not None:
        click.echo(_render_diagnosis(diagnose(run_directory), form), nl=False)
        return
    checks = check_machine()
    rows = [asdict(check) for check in checks]
    click.echo(render_rows(("name", "status", "seen", "mend"), rows, form), nl=False)
    failed = [check.name for check in checks if check.status == FAIL]
    if failed:
        raise RunFailed(f"{len(failed)} checks failed: {', '.join(failed)}")


def _render_diagnosis(diagnosis: Diagnosis, form: str) -> str:
    if form == "json":
        return json.dumps(asdict(diagnosis), indent=2, allow_nan=False) + "\n"
    rows: List[Dict[str, Any]] = [
        {
            "ranks": rank_words(position.ranks).partition(" ")[2],
            "call": position.sequence,
            "communicator": position.communicator,
            "operation": position.operation,
            "shape": "x".join(str(size) for size in position.shape) or None,
            "site": position.site,
            "state": "inside" if position.inside else "returned",
            "entered_utc": _clock(position.entered),
        }
        for position in diagnosis.positions
    ]
    columns = ("ranks", "call", "communicator", "operation", "shape", "site", "state", "entered_utc")
    table = render_rows(columns, rows, form)
    if form == "csv":
        return table
    mark = "* " if form == "md" else ""
    lines = [f"result: {diagnosis.result}", f"last: {diagnosis.last}", *diagnosis.findings]
    return "".join(f"{mark}{line}\n" for line in lines) + ("\n" + table if rows else "")


def _clock(seconds: float) -> Optional[str]:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds else None
