"""``fugaku-gpt job collect``: collect the results of jobs, and print the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.cli.report import TABLE_FORMATS, print_table, write_tables
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.gather import Gathered, gather
from fugaku_gpt.records.job import JOB_FILE
from fugaku_gpt.report.collect import collect_rows, find_runs
from fugaku_gpt.report.logged_run import LoggedRun, parse_settings
from fugaku_gpt.report.reparse import Reparsed, logs_of, reparse

_COLUMNS = ("run", "jobs", "status", "accounts", "notes")


@click.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PATH)
@click.option("--reparse", "again", is_flag=True, help="Read the logs of fugaku_gpt and Megatron again.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value that the log of another trainer lacks, for --reparse; repeatable.",
)
@click.option("--out", type=PATH, help="Write table.md, .html, .csv and .json into this folder.")
@format_option(TABLE_FORMATS, "table")
@click.option("--energy", is_flag=True, help="Show watts per node, and joules per iteration and per token.")
def collect(
    directories: Tuple[Path, ...],
    again: bool,
    settings: Tuple[str, ...],
    out: Optional[Path],
    form: str,
    energy: bool,
) -> None:
    """Collect the results of the jobs in DIR, and print the table.

    DIR is a run directory, or a folder of them. The scheduler's statistics (the .stats file of PJM, the accounting of
    Slurm) are written to accounting.json in each run; a run whose ranks wrote no result gets one that follows from how
    its job ended. Energy is reported only for jobs that ran for more than a minute: power is sampled no faster.
    """
    log_settings = parse_settings(settings)
    if settings and not again:
        raise UsageError("--set: gives what a log lacks; use it together with --reparse")
    reparsed = _reparse(directories, log_settings) if again else []
    job_directories = _job_directories(directories)
    gathered = _gather(job_directories)
    _print_gathered(gathered, reparsed)
    if out is not None:
        rows = write_tables(directories, out, ("md", "html", "csv", "json"))
    else:
        rows = collect_rows(directories)
    print_table(rows, form, energy=energy)


def _job_directories(directories: Tuple[Path, ...]) -> List[Path]:
    """The directories that contain records of jobs; the sub-runs of a bulk job share one."""
    runs = find_runs(directories)
    job_directories = [
        run if (run / JOB_FILE).exists() or not (run.parent / JOB_FILE).exists() else run.parent for run in runs
    ]
    return list(dict.fromkeys(job_directories))


def _gather(job_directories: List[Path]) -> List[Gathered]:
    if not sys.stderr.isatty() or len(job_directories) < 2:
        return gather(job_directories)
    with click.progressbar(length=len(job_directories), label="collecting", file=sys.stderr) as bar:
        return gather(job_directories, on_run=lambda _directory: bar.update(1))


def _reparse(directories: Tuple[Path, ...], log_settings: LoggedRun) -> List[Reparsed]:
    """Read the logs again; a folder that contains nothing else becomes a run."""
    targets: List[Path] = []
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such folder; give a run directory, or a folder of run directories")
        try:
            targets += _job_directories((directory,))
        except UsageError:
            if not logs_of(directory):
                raise
            targets.append(directory)
    return [reparse(target, log_settings) for target in dict.fromkeys(targets)]


def _print_gathered(gathered: List[Gathered], reparsed: List[Reparsed]) -> None:
    """Print what was collected on standard error; only the table goes to standard output."""
    summary_rows: List[Dict[str, Any]] = []
    for gathered_run in gathered:
        if gathered_run.jobs or gathered_run.accounts or gathered_run.notes:
            summary_rows.append(
                {
                    "run": gathered_run.directory.name or str(gathered_run.directory),
                    "jobs": " ".join(gathered_run.jobs) or None,
                    "status": gathered_run.status or None,
                    "accounts": gathered_run.accounts,
                    "notes": "; ".join(gathered_run.notes) or None,
                }
            )
    if summary_rows:
        echo(render_rows(_COLUMNS, summary_rows, "table"), err=True)
    for log in reparsed:
        summary = f"{log.lines} iteration lines of {log.trainer}, {log.added} new" if log.trainer else "nothing"
        echo("; ".join([f"{log.directory}: {summary}", *log.notes]), err=True)
