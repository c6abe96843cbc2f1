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
    from fugaku_gpt.jobs.poll import output_of, poll_runs

    folders, jobs = resolve_targets([target], store, scheduler)
    directory = _only_run_directory(folders[0]) if folders else jobs[0].directory

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
    _change_jobs(targets, store, scheduler, ("cancel", "cancelled"))


@click.command()
@_targets
@_store_option
@_scheduler_option
def hold(targets: Tuple[Path, ...], store: Path, scheduler: Optional[str]) -> None:
    """Hold the waiting jobs of run directories DIR, or the job with the id JOB, so that they do not start.

    Exit codes: 0 every request was accepted, 1 at least one was not.
    """
    _change_jobs(targets, store, scheduler, ("hold", "held"))


@click.command()
@_targets
@_store_option
@_scheduler_option
def release(targets: Tuple[Path, ...], store: Path, scheduler: Optional[str]) -> None:
    """Release the held jobs of run directories DIR, or the job with the id JOB, so that they can start.

    Exit codes: 0 every request was accepted, 1 at least one was not.
    """
    _change_jobs(targets, store, scheduler, ("release", "released"))


def _change_jobs(targets: Sequence[Path], store: Path, scheduler: Optional[str], change: Tuple[str, str]) -> None:
    """Ask each scheduler once to change jobs; print and record what it accepted.

    Args:
        targets: run directories, and ids of jobs.
        change: name of the scheduler's method, and of the event that is recorded.
    """
    from fugaku_gpt.jobs.by_id import NamedJob, resolve_targets
    from fugaku_gpt.jobs.poll import job_directories
    from fugaku_gpt.jobs.schedulers.registry import scheduler_named
    from fugaku_gpt.jobs.submission import resolve_intents
    from fugaku_gpt.records.job import LOST, OVER, append_event, read_history

    verb, event = change
    folders, jobs = resolve_targets(targets, store, scheduler)
    refused = []
    for directory in job_directories(folders):
        history = read_history(directory)
        for name in {
            intent.scheduler for intent in history.open
        }:  # whoever submitted it may have been killed: is there a job?
            history = resolve_intents(directory, scheduler_named(name), time.time())
        if history.open:
            echo(f"{directory}: a submission is not over, or was killed just now: try again in two minutes")
            refused.append(str(directory))
        for job in history.jobs:
            last = history.statuses.get(job.job_id)
            if last is None or last.state not in OVER or (verb == "cancel" and last.state == LOST):
                jobs.append(NamedJob(job.scheduler, job.job_id, directory))
    if not jobs and not refused:
        raise UsageError("no job is waiting or running there")
    for name in dict.fromkeys(job.scheduler for job in jobs):
        directories = {job.job_id: job.directory for job in jobs if job.scheduler == name}
        for job_id, refusal in getattr(scheduler_named(name), verb)(list(directories)).items():
            where = directories[job_id]
            echo(f"{where}: {job_id}: {refusal or event}" if where is not None else f"{job_id}: {refusal or event}")
            if refusal:
                refused.append(job_id)
            elif where is not None:
                append_event(where, event, time.time(), job_id=job_id)
    if refused:
        raise RunFailed(f"not {event}: {', '.join(refused)}")


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


def _only_run_directory(directory: Path) -> Path:
    from fugaku_gpt.jobs.poll import job_directories

    run_directories = job_directories([directory])
    if len(run_directories) != 1:
        raise UsageError(f"{directory}: holds {len(run_directories)} run directories; name one")
    return run_directories[0]


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
