"""``fugaku-gpt sweep``: many runs from one file, on this machine or over a batch system."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.numbers import seconds_of_option
from fugaku_gpt.cli.options import PATH, format_option, options_as, scheduler_option, scheduler_overrides
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.cli.sweep_frontier import frontier
from fugaku_gpt.cli.sweep_plan import print_jobs, print_notes
from fugaku_gpt.cli.sweep_runs import follow_text, refusal_lines, run_on_this_machine, submit_jobs
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.records.run import OK, REFUSED
from fugaku_gpt.sweep.expand import Run, expand_sweep
from fugaku_gpt.sweep.plan import PLAN_FILE as PLAN_FILE
from fugaku_gpt.sweep.plan import SweepPlan, plan_of, read_plan

if TYPE_CHECKING:
    from fugaku_gpt.sweep.run import EndedRun
    from fugaku_gpt.sweep.submit import RunStanding, SubmittedSweep

_COLUMNS = (
    "run", "ranks", "dp", "tp", "pp", "micro_batch", "global_batch", "iterations", "nodes", "node_hours", "variant",
    "status", "digest", "reason",
)  # fmt: skip
_STATUS_COLUMNS = ("run", "status", "job", "iteration", "seconds_per_iteration", "reason", "advice")

_set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting in every row; repeatable."
)
_scheduler_option = scheduler_option("Scheduler of the jobs; sets job.scheduler in every row.")


@dataclass(frozen=True)
class SubmitOptions:
    """How the jobs of a sweep are submitted.

    Attributes:
        scheduler: sets ``job.scheduler`` in every row; None leaves it.
        overrides: ``key=value`` over every row.
        max_in_flight: largest number of jobs of the sweep that wait or run at once; None for no limit.
        dry_run: whether the jobs are only printed.
        scripts: whether their scripts are printed as well.
        wait: whether to wait until all jobs have ended.
        yes: whether to submit without asking for confirmation.
    """

    scheduler: Optional[str]
    overrides: Tuple[str, ...]
    max_in_flight: Optional[int]
    dry_run: bool
    scripts: bool
    wait: bool
    yes: bool

    @property
    def all_overrides(self) -> Tuple[str, ...]:
        """``overrides``, and that of the scheduler."""
        return (*self.overrides, *scheduler_overrides(self.scheduler))

    def arguments(self) -> List[str]:
        """The options as arguments of a command line, without ``--dry-run`` and ``--yes``."""
        arguments = ["--scheduler", self.scheduler] if self.scheduler is not None else []
        arguments += [word for text in self.overrides for word in ("--set", text)]
        return arguments + (["--max-in-flight", str(self.max_in_flight)] if self.max_in_flight is not None else [])


def _submit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of :class:`SubmitOptions` to a command, which gets them in ``options``."""
    command = options_as(SubmitOptions)(function)
    command = click.option("--yes", is_flag=True, help="Do not ask for confirmation on a terminal.")(command)
    command = click.option(
        "--wait",
        is_flag=True,
        help="Wait until all jobs have ended; with --max-in-flight, the next ones are submitted as jobs end.",
    )(command)
    command = click.option("--scripts", is_flag=True, help="Print the script of every job as well; needs --dry-run.")(
        command
    )
    command = click.option(
        "--dry-run", is_flag=True, help="Print a table of the jobs with their node-hours; write and submit nothing."
    )(command)
    command = click.option(
        "--max-in-flight",
        metavar="N",
        type=click.IntRange(min=1),
        help="Largest number of jobs of this sweep that may be waiting or running; default: no limit.",
    )(command)
    return _scheduler_option(_set_option(command))


@click.group()
def sweep() -> None:
    """Expand a sweep file into its runs; run them here, or submit them as jobs and follow them."""


sweep.add_command(frontier)


@sweep.command()
@click.argument("file", type=PATH)
@_set_option
@_scheduler_option
@format_option()
def expand(file: Path, overrides: Tuple[str, ...], scheduler: Optional[str], form: str) -> None:
    """Show the runs of a sweep FILE in the order in which they would be run; nothing is started."""
    sweep_overrides = (*overrides, *scheduler_overrides(scheduler))
    expanded = expand_sweep(file, sweep_overrides)
    print_notes(expanded.runs)
    rows = [_run_row(run) for run in expanded.runs]
    echo(render_rows(_COLUMNS, rows, form), nl=False)


@sweep.command()
@click.argument("file", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder for the run directories and the tables.")
@click.option(
    "--scheduler",
    type=click.Choice(["local"]),
    default="local",
    show_default=True,
    help="Scheduler: this machine runs them and the command waits; see `sweep submit` for batch systems.",
)
@_set_option
@click.option("--timeout", metavar="H:MM:SS", callback=seconds_of_option, help="Time limit of each run; default: none.")
@click.option("--retry-failed", is_flag=True, help="Run again the runs that failed, timed out or ran out of memory.")
def run(
    file: Path,
    out: Path,
    scheduler: str,
    overrides: Tuple[str, ...],
    timeout: Optional[float],
    retry_failed: bool,
) -> None:
    """Run a sweep FILE with mpirun, one run at a time; print the table at the end.

    A failure is a row of the table and does not stop the other runs. Ctrl-C stops the sweep; the same command resumes
    it: only missing runs are run. The tables are written to OUT as table.md, table.csv and table.json.
    """
    from fugaku_gpt.cli.report import print_table, write_tables

    expanded = expand_sweep(file, overrides)
    print_notes(expanded.runs)
    ended = run_on_this_machine(expanded, out, plan_of(file, overrides), timeout, retry_failed)
    rows = write_tables([out], out)
    print_table(rows, "table")
    closing = _closing_text(ended, len(expanded.runs), out)
    if any(ended_run.has_failed for ended_run in ended) or len(ended) < len(expanded.runs):
        raise RunFailed(closing)
    echo(closing, err=True)


@sweep.command()
@click.argument("file", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder for the run directories.")
@_submit_options
def submit(file: Path, out: Path, options: SubmitOptions) -> None:
    """Submit the runs of a sweep FILE as jobs, and return at once, or with --wait when all have ended.

    Runs that have a result, or a job that is waiting or running, are skipped, so that the same command continues: after
    --max-in-flight has held some back, after Ctrl-C, after a kill at any moment. Failed runs are submitted again by
    `sweep resume`.

    Exit codes: 0 submitted, or with --wait all ended well; 1 a scheduler refused a job, or with --wait a run failed.
    """
    command = ["sweep", "submit", str(file), "--out", str(out), *options.arguments()]
    _submit(plan_of(file, options.all_overrides), out, options, command, resume=False)


@sweep.command()
@click.argument("target", metavar="DIR|FILE", type=PATH)
@click.option("--out", type=PATH, help="Folder of the run directories, for a sweep FILE.")
@_submit_options
def resume(target: Path, out: Optional[Path], options: SubmitOptions) -> None:
    """Submit the runs that are missing or have failed, and no others; earlier attempts are moved to OUT/attempts.

    DIR is a folder that a sweep was started in; with a sweep FILE, give --out as well.
    """
    plan, folder = _plan_and_folder(target, out, options.all_overrides)
    command = ["sweep", "resume", str(target), *(["--out", str(out)] if out is not None else []), *options.arguments()]
    _submit(plan, folder, options, command, resume=True)


@sweep.command()
@click.argument("directory", metavar="DIR", type=PATH)
@format_option()
@click.option("--no-ask", is_flag=True, help="Report what is recorded, without asking any scheduler.")
def status(directory: Path, form: str, no_ask: bool) -> None:
    """Show the state of every run of the sweep in DIR: missing, waiting, running, or how and why it ended."""
    from fugaku_gpt.sweep.folder import with_recorded_names
    from fugaku_gpt.sweep.submit import run_standings

    plan, folder = _plan_and_folder(directory, None, ())
    standings = run_standings(with_recorded_names(plan.sweep(), folder), folder, query_schedulers=not no_ask)
    echo(render_rows(_STATUS_COLUMNS, [_standing_row(standing) for standing in standings], form), nl=False)
    echo(_status_counts(standings), err=True)


def _submit(plan: SweepPlan, out: Path, options: SubmitOptions, command: List[str], resume: bool) -> None:
    """Submit what is missing, or print what would be submitted.

    Args:
        command: arguments of the command line that continues this one.
        resume: whether failed runs are submitted again.

    Raises:
        RunFailed: a scheduler has refused a job, or does not answer.
    """
    if options.dry_run:
        from fugaku_gpt.sweep.submit import planned_jobs

        expanded = plan.sweep()
        standings, planned = planned_jobs(expanded, out, plan, resume)
        print_jobs(expanded, standings, planned, options.scripts)
        return
    if options.scripts:
        raise UsageError("--scripts: goes with --dry-run")
    submission = submit_jobs(plan, out, options.max_in_flight, resume, options.yes, options.wait)
    print_notes([standing.run for standing in submission.standings])
    closing = _submission_text(submission, out, command, resume, options.wait)
    has_failures = options.wait and any(_has_failed(standing) for standing in submission.standings)
    if submission.refused or submission.stop_reason or has_failures:
        raise RunFailed(closing)
    echo(closing, err=True)


def _has_failed(standing: "RunStanding") -> bool:
    is_refused_row = standing.status == REFUSED and not standing.job_id
    return standing.status not in (OK, "missing") and not standing.in_flight and not is_refused_row


def _submission_text(
    submission: "SubmittedSweep", out: Path, command: List[str], resume: bool, is_complete: bool
) -> str:
    """Return what was submitted, what is left, and how to continue.

    Args:
        is_complete: whether the standings are those after the submitted jobs, and not those before.
    """
    lines = [f"{len(submission.standings)} runs: {len(submission.job_ids)} submitted now, {submission.remaining} left"]
    lines += refusal_lines(submission)
    shown = [
        standing for standing in submission.standings if is_complete or standing.run.name not in submission.job_ids
    ]
    lines += [f"{'runs' if is_complete else 'of the others'}: {_status_counts(shown)}"] if shown else []
    lines += [submission.stop_reason] if submission.stop_reason else []
    if submission.remaining:
        lines.append(f"to continue: fugaku-gpt {shlex.join(command)}")
        lines.append(f"  or as jobs end, with --wait, or every ten minutes by cron: {_cron_line(command)}")
    failed = [standing for standing in shown if _has_failed(standing)]
    if failed and not resume:
        lines.append(f"to submit failed runs again: fugaku-gpt sweep resume {shlex.quote(str(out))}")
    lines.append(follow_text(out))
    return "\n".join(lines)


def _cron_line(command: Sequence[str]) -> str:
    """A line of a crontab that continues a submission: with absolute paths, as cron has another folder and PATH."""
    program = shutil.which("fugaku-gpt") or f"{sys.executable} -m fugaku_gpt"
    line = f"cd {shlex.quote(os.getcwd())} && {program} {shlex.join([*command, '--yes'])}"
    return "*/10 * * * * " + line.replace("%", "\\%")


def _plan_and_folder(target: Path, out: Optional[Path], overrides: Tuple[str, ...]) -> Tuple[SweepPlan, Path]:
    """The plan of a sweep's folder, or of a sweep file and the folder that goes with it.

    Raises:
        UsageError: the target is neither, or a file comes without its folder.
    """
    if not target.is_dir():
        if out is None:
            raise UsageError(f"{target}: with a sweep file, name the folder of its runs with --out")
        return plan_of(target, overrides), out
    if out is not None:
        raise UsageError(f"--out {out}: {target} is the folder already; leave --out out, or name a sweep file")
    plan = read_plan(target)
    if plan is None:
        raise UsageError(
            f"{target}: no sweep was started there (it has no {PLAN_FILE}); name the sweep file, and --out"
        )
    if overrides:
        plan = SweepPlan(plan.file, plan.name, plan.text, (*plan.overrides, *overrides), plan.base)
    return plan, target


def _standing_row(standing: "RunStanding") -> Dict[str, Any]:
    total = standing.run.config.training.iterations if standing.run.config is not None else None
    pace = standing.seconds_per_iteration
    return {
        "run": standing.run.name,
        "status": standing.status,
        "job": standing.job_id or None,
        "iteration": f"{standing.iterations}/{total}" if standing.iterations and total is not None else None,
        "seconds_per_iteration": float(f"{pace:.4g}") if pace is not None else None,
        "reason": standing.reason or None,
        "advice": standing.advice or None,
    }


def _status_counts(standings: Sequence["RunStanding"]) -> str:
    counts: Dict[str, int] = {}
    for standing in standings:
        counts[standing.status] = counts.get(standing.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK))


def _closing_text(ended: List["EndedRun"], total: int, out: Path) -> str:
    counts: Dict[str, int] = {}
    for ended_run in ended:
        counts[ended_run.result.status] = counts.get(ended_run.result.status, 0) + 1
    counts_text = ", ".join(
        f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK)
    )
    lines = [f"{total} runs: {counts_text}" + (f", {total - len(ended)} not started" if len(ended) < total else "")]
    if ended[-1].was_stopped:
        lines.append("stopped; the same command runs what is missing")
    lines.append(f"tables: {out / 'table.md'}, {out / 'table.csv'}, {out / 'table.json'}")
    return "\n".join(lines)


def _run_row(run: Run) -> Dict[str, Any]:
    if run.config is None:
        keys = {
            "dp": "layout.dp",
            "tp": "layout.tp",
            "pp": "layout.pp",
            "micro_batch": "training.micro_batch",
            "global_batch": "training.global_batch",
            "iterations": "training.iterations",
            "nodes": "job.nodes",
        }
        shown = {column: run.written_settings.get(key) for column, key in keys.items()}
        reason = run.refusal.replace("\n", "; ")
        return {
            "run": run.name,
            "variant": run.variant or None,
            **shown,
            "status": REFUSED,
            "digest": run.digest,
            "reason": reason,
        }
    from fugaku_gpt.jobs.billing import node_hours

    layout, training = run.config.layout, run.config.training
    hours = node_hours(run.config)
    return {
        "run": run.name,
        "variant": run.variant or None,
        "nodes": run.config.job.nodes,
        "node_hours": float(f"{hours:.4g}") if hours is not None else None,
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
