"""``fugaku-gpt job status|watch|logs|cancel|hold|release``: follow jobs and change them."""

from __future__ import annotations

import codecs
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.job.changes import json_lines, print_changes, require_success
from fugaku_gpt.cli.options import FORMATS, PATH, format_option, scheduler_option
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.input_files import blocks_of, open_file, start_of_last_lines

if TYPE_CHECKING:
    from fugaku_gpt.jobs.change import JobChange
    from fugaku_gpt.jobs.poll import PolledRun

STORE = Path("runs")
COLUMNS = ("run", "job", "state", "status", "cause", "advice")
STATUS_FORMATS = (*FORMATS, "jsonl")
_FOLLOW_SECONDS = 0.5

_targets = click.argument("targets", metavar="DIR|JOB...", nargs=-1, required=True, type=PATH)
_some_directories = click.argument("directories", metavar="[DIR]...", nargs=-1, type=PATH)
_store_option = click.option(
    "--store", type=PATH, default=STORE, show_default=True, help="Folder of run directories, used if no DIR is given."
)

_longest_option = click.option(
    "--longest",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Longest time between two queries, in seconds.",
)
_scheduler_option = scheduler_option("Scheduler of a JOB that no run directory has; default: the one on this machine.")


@click.command()
@click.argument("targets", metavar="[DIR|JOB]...", nargs=-1, type=PATH)
@_store_option
@_scheduler_option
@format_option(STATUS_FORMATS)
@click.option("--watch", "is_watching", is_flag=True, help="Print a line for each change until all jobs have ended.")
@_longest_option
def status(
    targets: Tuple[Path, ...], store: Path, scheduler: Optional[str], form: str, is_watching: bool, longest: float
) -> None:
    """Show what the jobs of run directories are doing, and how they ended; each scheduler is queried once.

    DIR is a run directory or a folder of them, JOB the id of a job: of a run directory in the store, or one that was
    submitted by other means. The exit code is 0, whatever the jobs did.

    With --format jsonl, other programs get an object on a line for each job; with --watch as well, for each change.
    """
    from fugaku_gpt.jobs.by_id import poll_other_jobs, resolve_targets
    from fugaku_gpt.jobs.poll import job_directories, poll_runs, watch_polls

    if is_watching and form != "jsonl":
        raise UsageError("--watch prints lines: add --format jsonl; `fugaku-gpt job watch` shows a table that changes")
    folders, jobs = resolve_targets(targets, store, scheduler)
    recorded = dict.fromkeys(job.directory for job in jobs if job.directory is not None)
    directories = job_directories(folders if targets else [store]) + list(recorded)

    def poll() -> List[PolledRun]:
        return poll_runs(directories) + poll_other_jobs([job for job in jobs if job.directory is None])

    if is_watching:
        print_changes(watch_polls(poll, max_wait=longest), json_lines)
    elif form == "jsonl":
        print_changes([poll()], json_lines)
    else:
        echo(render_rows(COLUMNS, [_row(run) for run in poll()], form), nl=False)


@click.command()
@_some_directories
@_store_option
@_longest_option
def watch(directories: Tuple[Path, ...], store: Path, longest: float) -> None:
    """Follow jobs until all have ended: a live table on a terminal, a line for each change elsewhere.

    It only watches: if you stop it, or lose the connection, the jobs continue.

    Exit codes: 0 all jobs ended well, 1 at least one did not.
    """
    from fugaku_gpt.jobs import poll

    steps = poll.watch_runs(poll.job_directories(directories or (store,)), max_wait=longest)
    require_success(_watch_live(steps) if sys.stdout.isatty() else print_changes(steps))


@click.command()
@click.argument("target", metavar="DIR|JOB", type=PATH)
@_store_option
@_scheduler_option
@click.option("--follow", "-f", is_flag=True, help="Keep printing new output until the job has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="Print the output of this rank instead of the script's.")
@click.option("--lines", "-n", type=click.IntRange(min=0), help="Print only this many last lines of each file.")
def logs(
    target: Path, store: Path, scheduler: Optional[str], follow: bool, rank: Optional[int], lines: Optional[int]
) -> None:
    """Print the output of the job of a run directory DIR: that of its script and rank 0, or that of one rank.

    JOB is the id of a job of a run directory in the store, or of one that was submitted by other means: its output is
    looked for in the present folder.

    Exit codes: 0 something was printed, 2 there is nothing to print yet.
    """
    from fugaku_gpt.jobs.by_id import poll_other_jobs, resolve_targets
    from fugaku_gpt.jobs.poll import only_run_directory, output_of, poll_runs

    folders, jobs = resolve_targets([target], store, scheduler)
    directory = only_run_directory(folders[0]) if folders else jobs[0].directory

    def poll() -> PolledRun:
        return (poll_runs([directory]) if directory is not None else poll_other_jobs(jobs))[0]

    run = poll()
    files = _shown_files(output_of(run), rank)
    if not files and not (follow and not run.is_over):
        raise UsageError(_no_output_message(run, rank, output_of(run)))
    ends = {path: _print_file(path, len(files) > 1, lines) for path in files}
    while follow and not run.is_over:
        deadline = time.monotonic() + 10 * _FOLLOW_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_FOLLOW_SECONDS)
            _print_new_output(ends)
        run = poll()
        for path in _shown_files(output_of(run), rank):
            ends.setdefault(path, 0)
        _print_new_output(ends)


@click.command()
@_targets
@_store_option
@_scheduler_option
def cancel(targets: Tuple[Path, ...], store: Path, scheduler: Optional[str]) -> None:
    """Cancel the jobs of run directories DIR, with all links of a chain, or the job with the id JOB.

    Exit codes: 0 every request was accepted, 1 at least one was not.
    """
    from fugaku_gpt.jobs.change import CANCEL

    _change_jobs(targets, store, scheduler, CANCEL)


@click.command()
@_targets
@_store_option
@_scheduler_option
def hold(targets: Tuple[Path, ...], store: Path, scheduler: Optional[str]) -> None:
    """Hold the waiting jobs of run directories DIR, or the job with the id JOB, so that they do not start.

    Exit codes: 0 every request was accepted, 1 at least one was not.
    """
    from fugaku_gpt.jobs.change import HOLD

    _change_jobs(targets, store, scheduler, HOLD)


@click.command()
@_targets
@_store_option
@_scheduler_option
def release(targets: Tuple[Path, ...], store: Path, scheduler: Optional[str]) -> None:
    """Release the held jobs of run directories DIR, or the job with the id JOB, so that they can start.

    Exit codes: 0 every request was accepted, 1 at least one was not.
    """
    from fugaku_gpt.jobs.change import RELEASE

    _change_jobs(targets, store, scheduler, RELEASE)


def _change_jobs(targets: Sequence[Path], store: Path, scheduler: Optional[str], change: JobChange) -> None:
    """Change the jobs of run directories, and those of ids; print what each scheduler has answered."""
    from fugaku_gpt.jobs.by_id import resolve_targets
    from fugaku_gpt.jobs.change import change_jobs
    from fugaku_gpt.jobs.poll import job_directories

    folders, jobs = resolve_targets(targets, store, scheduler)
    refused = []
    for answer in change_jobs(job_directories(folders), jobs, change):
        where = [str(answer.directory)] if answer.directory is not None else []
        echo(": ".join([*where, *filter(None, [answer.job_id]), answer.refusal or change.event]))
        if answer.refusal:
            refused.append(answer.job_id or str(answer.directory))
    if refused:
        raise RunFailed(f"not {change.event}: {', '.join(refused)}")


def _row(run: PolledRun) -> Dict[str, Any]:
    outcome = run.outcome
    job = run.job_id + (f" ({run.link} of {run.chain})" if run.chain > 1 else "")
    cells = {
        "run": str(run.directory) if run.is_recorded else "",
        "job": job,
        "state": outcome.state,
        "status": outcome.status,
        "cause": outcome.cause,
        "advice": outcome.advice,
    }
    return {name: cell or None for name, cell in cells.items()}


def _watch_live(steps: Any) -> List[PolledRun]:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    last: List[PolledRun] = []
    with Live(auto_refresh=False) as live:
        for last in steps:
            table = Table(caption=f"{time.strftime('%H:%M:%S')}  Ctrl-C stops watching; the jobs continue")
            for name in COLUMNS:
                table.add_column(name)
            for run in last:
                row = _row(run)
                table.add_row(*(Text(str(row[name] or "-")) for name in COLUMNS))
            live.update(table, refresh=True)
    return last


def _shown_files(files: Sequence[Path], rank: Optional[int]) -> List[Path]:
    ranks = [path for path in files if path.name.startswith("std")]
    if rank is None:
        return [path for path in files if path not in ranks] + [path for path in ranks if path.name.endswith(".0")]
    return [path for path in ranks if path.name.endswith(f".{rank}")]


def _no_output_message(run: PolledRun, rank: Optional[int], files: Sequence[Path]) -> str:
    source = f"rank {rank}" if rank is not None else "its job"
    hint = "; its ranks print into one file: leave --rank out" if rank is not None and files else ""
    subject = str(run.directory) if run.is_recorded else f"{run.scheduler} job {run.job_id}"
    return f"{subject}: {source} has printed nothing yet; state: {run.outcome.state or 'not submitted'}{hint}"


def _print_file(path: Path, named: bool, lines: Optional[int]) -> int:
    """Print a file, or its last lines; returns the position of its end."""
    with open_file(path) as stream:
        start = start_of_last_lines(stream, lines) if lines is not None else 0
        if named:
            echo(f"==> {path} <==")
        return _print_from(stream, start)


def _print_new_output(ends: Dict[Path, int]) -> None:
    for path, end in ends.items():
        try:
            with open_file(path) as stream:
                ends[path] = _print_from(stream, end)
        except FileNotFoundError:  # moved away as an earlier attempt
            continue


def _print_from(stream: BinaryIO, position: int) -> int:
    """Print a file from a position to its end, a block at a time, as text; returns the position of its end. Control
    characters, which could steer the terminal, are made visible."""
    if position:
        stream.seek(position)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for block in blocks_of(stream, sys.maxsize):
        position += len(block)
        echo(decoder.decode(block), nl=False)
    echo(decoder.decode(b"", final=True), nl=False)
    sys.stdout.flush()
    return position
