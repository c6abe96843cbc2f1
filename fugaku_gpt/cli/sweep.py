"""``fugaku-gpt sweep``: many runs from one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import click

from fugaku_gpt.cli.output import format_option, render_rows
from fugaku_gpt.cli.report import print_table, write_tables
from fugaku_gpt.config.values import BadValue, parse_duration
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.jobs.launcher import find_launcher, launch
from fugaku_gpt.records.run import INTERRUPTED, OK, REFUSED
from fugaku_gpt.sweep.expand import Run, expand_sweep
from fugaku_gpt.sweep.progress import LiveProgress, PlainProgress
from fugaku_gpt.sweep.run import Ended, run_sweep

_COLUMNS = ("run", "ranks", "dp", "tp", "pp", "micro_batch", "global_batch", "iterations", "status", "digest", "reason")

_set_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override in every row.")


def _seconds(_ctx: click.Context, _param: click.Parameter, value: Optional[str]) -> Optional[float]:
    """The seconds of a duration on the command line."""
    if value is None:
        return None
    try:
        seconds = parse_duration(value)
    except BadValue as error:
        raise click.BadParameter(f"{value!r}: {error}") from None
    if seconds <= 0:
        raise click.BadParameter(f"{value!r}: must be above 0")
    return seconds


@click.group()
def sweep() -> None:
    """Expand a sweep file to its runs, and run them."""


@sweep.command()
@click.argument("file", type=click.Path(path_type=Path))
@_set_option
@format_option
def expand(file: Path, overrides: Tuple[str, ...], form: str) -> None:
    """Show the runs of a sweep FILE in the order in which they would be run; start nothing."""
    rows = [_expanded(run) for run in expand_sweep(file, overrides).runs]
    click.echo(render_rows(_COLUMNS, rows, form), nl=False)


@sweep.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of run directories and tables.")
@click.option(
    "--scheduler", type=click.Choice(["local"]), default="local", show_default=True, help="Who runs: this machine."
)
@_set_option
@click.option("--timeout", metavar="H:MM:SS", callback=_seconds, help="End a run after this time, as a timeout.")
@click.option("--retry-failed", is_flag=True, help="Run again what failed, timed out or ran out of memory.")
def run(
    file: Path,
    out: Path,
    scheduler: str,
    overrides: Tuple[str, ...],
    timeout: Optional[float],
    retry_failed: bool,
) -> None:
    """Run a sweep FILE, one run at a time, with mpirun; print the table at the end.

    A failure is a row of the table and does not stop the rest. Ctrl-C stops; the same command resumes: only what is
    missing is run. Tables are left in OUT as table.md, table.csv and table.json.
    """
    expanded = expand_sweep(file, overrides)
    find_launcher()  # says how to get one, before anything is written
    live = sys.stderr.isatty()
    shown: Union[LiveProgress, PlainProgress] = LiveProgress() if live else PlainProgress(sys.stderr)
    with shown as progress:
        ended = run_sweep(expanded, out, launch, progress, timeout=timeout, retry_failed=retry_failed)
    rows = write_tables([out], out)
    print_table(rows, "table")
    closing = _closing(ended, len(expanded.runs), out)
    if any(one.failed for one in ended):
        raise RunFailed(closing)
    click.echo(closing, err=True)


def _closing(ended: List[Ended], total: int, out: Path) -> str:
    counts: Dict[str, int] = {}
    for one in ended:
        counts[one.result.status] = counts.get(one.result.status, 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK))
    lines = [f"{total} runs: {said}" + (f", {total - len(ended)} not started" if len(ended) < total else "")]
    if ended[-1].result.status == INTERRUPTED:
        lines.append("stopped; the same command runs what is missing")
    lines.append(f"tables: {out / 'table.md'}, {out / 'table.csv'}, {out / 'table.json'}")
    return "\n".join(lines)


def _expanded(run: Run) -> Dict[str, Any]:
    if run.config is None:
        keys = {
            "dp": "layout.dp",
            "tp": "layout.tp",
            "pp": "layout.pp",
            "micro_batch": "training.micro_batch",
            "global_batch": "training.global_batch",
            "iterations": "training.iterations",
        }
        shown = {column: run.written.get(key) for column, key in keys.items()}
        reason = run.refusal.replace("\n", "; ")
        return {"run": run.name, **shown, "status": REFUSED, "digest": run.digest, "reason": reason}
    layout, training = run.config.layout, run.config.training
    return {
        "run": run.name,
        "ranks": layout.ranks,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "micro_batch": training.micro_batch,
        "global_batch": training.global_batch,
        "iterations": training.iterations,
        "status": "to run",
        "digest": run.digest,
    }
