"""``fugaku-gpt sweep``: many runs from one file, on this machine or over a batch system."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

import click

from fugaku_gpt.cli.numbers import seconds_of_option
from fugaku_gpt.cli.output import format_option, render_rows
from fugaku_gpt.config.schema import SCHEDULERS
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.records.run import OK, REFUSED
from fugaku_gpt.sweep.expand import Run, Sweep, expand_sweep
from fugaku_gpt.sweep.plan import FILE as PLAN_FILE
from fugaku_gpt.sweep.plan import Plan, plan_of, read_plan

if TYPE_CHECKING:
    from fugaku_gpt.sweep.run import Ended
    from fugaku_gpt.sweep.submit import Handed, Planned, Standing

_COLUMNS = (
    "run", "ranks", "dp", "tp", "pp", "micro_batch", "global_batch", "iterations", "nodes", "node_hours", "variant",
    "status", "digest", "reason",
)  # fmt: skip
_STATUS_COLUMNS = ("run", "status", "job", "iteration", "seconds_per_iteration", "reason", "advice")

_set_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override in every row.")
_scheduler_option = click.option(
    "--scheduler", type=click.Choice(SCHEDULERS), help="Who runs the jobs; sets job.scheduler in every row."
)
_out_option = click.option("--out", type=click.Path(path_type=Path), help="Folder of the run directories.")
_limit_option = click.option(
    "--max-in-flight",
    metavar="N",
    type=click.IntRange(min=1),
    help="Jobs of this sweep that may be waiting or running.",
)
_dry_option = click.option(
    "--dry-run", is_flag=True, help="Print every job, its script and its node-hours; write nothing."
)
_yes_option = click.option("--yes", is_flag=True, help="Do not ask before handing in.")


@click.group()
def sweep() -> None:
    """Expand a sweep file to its runs; run them here, or hand them in as jobs and follow them."""


@sweep.command()
@click.argument("file", type=click.Path(path_type=Path))
@_set_option
@_scheduler_option
@format_option
def expand(file: Path, overrides: Tuple[str, ...], scheduler: Optional[str], form: str) -> None:
    """Show the runs of a sweep FILE in the order in which they would be run; start nothing."""
    rows = [_expanded(run) for run in expand_sweep(file, _overrides(overrides, scheduler)).runs]
    click.echo(render_rows(_COLUMNS, rows, form), nl=False)


@sweep.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of run directories and tables.")
@click.option(
    "--scheduler",
    type=click.Choice(["local"]),
    default="local",
    show_default=True,
    help="Who runs: this machine, and this command waits; `sweep submit` hands in.",
)
@_set_option
@click.option(
    "--timeout", metavar="H:MM:SS", callback=seconds_of_option, help="End a run after this time, as a timeout."
)
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
    from fugaku_gpt.cli.report import print_table, write_tables
    from fugaku_gpt.launch.launcher import find_launcher, launch
    from fugaku_gpt.sweep.progress import LiveProgress, PlainProgress
    from fugaku_gpt.sweep.run import run_sweep

    expanded = expand_sweep(file, overrides)
    find_launcher()  # says how to get one, before anything is written
    live = sys.stderr.isatty()
    shown: Union[LiveProgress, PlainProgress] = LiveProgress() if live else PlainProgress(sys.stderr)
    with shown as progress:
        ended = run_sweep(
            expanded, out, launch, progress, timeout=timeout, retry_failed=retry_failed, plan=plan_of(file, overrides)
        )
    rows = write_tables([out], out)
    print_table(rows, "table")
    closing = _closing(ended, len(expanded.runs), out)
    if any(one.failed for one in ended) or len(ended) < len(expanded.runs):
        raise RunFailed(closing)
    click.echo(closing, err=True)


@sweep.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run directories.")
@_scheduler_option
@_set_option
@_limit_option
@_dry_option
@_yes_option
def submit(
    file: Path,
    out: Path,
    scheduler: Optional[str],
    overrides: Tuple[str, ...],
    max_in_flight: Optional[int],
    dry_run: bool,
    yes: bool,
) -> None:
    """Hand in the runs of a sweep FILE as jobs, and return at once.

    What has a result, or a job on its way, is left alone, so the same command goes on: after --max-in-flight has held
    some back, after Ctrl-C, after a kill at any moment. Failed runs are handed in again by `sweep resume`.
    """
    plan = plan_of(file, tuple(_overrides(overrides, scheduler)))
    again = ["sweep", "submit", str(file), "--out", str(out)]
    again += ["--scheduler", scheduler] if scheduler is not None else []
    again += [word for text in overrides for word in ("--set", text)]
    _hand_in(plan, out, max_in_flight, dry_run, yes, False, again)


@sweep.command()
@click.argument("target", metavar="DIR|FILE", type=click.Path(path_type=Path))
@_out_option
@_scheduler_option
@_set_option
@_limit_option
@_dry_option
@_yes_option
def resume(
    target: Path,
    out: Optional[Path],
    scheduler: Optional[str],
    overrides: Tuple[str, ...],
    max_in_flight: Optional[int],
    dry_run: bool,
    yes: bool,
) -> None:
    """Hand in what is missing or has failed, and nothing else; earlier attempts are kept in OUT/attempts.

    DIR is a folder that a sweep was started in; with a sweep FILE, give --out as well.
    """
    plan, folder = _plan_and_folder(target, out, tuple(_overrides(overrides, scheduler)))
    again = ["sweep", "resume", str(target)] + (["--out", str(out)] if out is not None else [])
    again += ["--scheduler", scheduler] if scheduler is not None else []
    again += [word for text in overrides for word in ("--set", text)]
    _hand_in(plan, folder, max_in_flight, dry_run, yes, True, again)


@sweep.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@format_option
@click.option("--no-ask", is_flag=True, help="Tell what is recorded; ask no scheduler.")
def status(directory: Path, form: str, no_ask: bool) -> None:
    """Show where every run of the sweep in DIR stands: missing, waiting, running, how it ended, why, and what to do."""
    from fugaku_gpt.sweep.folder import settled
    from fugaku_gpt.sweep.submit import standings_of

    plan, folder = _plan_and_folder(directory, None, ())
    standings = standings_of(settled(plan.sweep(), folder), folder, ask=not no_ask)
    click.echo(render_rows(_STATUS_COLUMNS, [_stood(one) for one in standings], form), nl=False)
    click.echo(_counts(standings), err=True)


def _hand_in(
    plan: Plan,
    out: Path,
    max_in_flight: Optional[int],
    dry_run: bool,
    yes: bool,
    again_failed: bool,
    again: List[str],
) -> None:
    from fugaku_gpt.sweep.submit import planned_jobs, submit_sweep

    expanded = plan.sweep()
    if dry_run:
        standings, planned = planned_jobs(expanded, out, plan, again_failed)
        _print_jobs(expanded, standings, planned)
        return

    def told(number: int, total: int, planned: "Planned", said: str) -> None:
        click.echo(f"[{number}/{total}] {planned.run.name}: {said}", err=True)

    def agreed(planned: Sequence["Planned"]) -> bool:
        if not planned or yes or not sys.stdin.isatty():
            return True
        return click.confirm(f"hand in {_sum_words(planned)}?", err=True)

    handed = submit_sweep(
        expanded, out, plan, max_in_flight=max_in_flight, resume=again_failed, told=told, agreed=agreed
    )
    again += ["--max-in-flight", str(max_in_flight)] if max_in_flight is not None else []
    closing = _handed_words(handed, out, again, again_failed)
    if handed.refused or handed.stopped:
        raise RunFailed(closing)
    click.echo(closing, err=True)


def _handed_words(handed: "Handed", out: Path, again: List[str], again_failed: bool) -> str:
    lines = [f"{len(handed.standings)} runs: {len(handed.taken)} handed in now, {handed.left} left"]
    lines += [f"{name}: not taken: {why}" for name, why in handed.refused.items()]
    before = [one for one in handed.standings if one.run.name not in handed.taken]
    found = _counts(before)
    lines += [f"of the others: {found}"] if before else []
    lines += [handed.stopped] if handed.stopped else []
    if handed.left:
        lines.append(f"to go on: fugaku-gpt {shlex.join(again)}")
    failed = [
        one for one in before if one.status not in (OK, REFUSED) and not one.in_flight and one.status != "missing"
    ]
    if failed and not again_failed:
        lines.append(f"to hand in what has failed again: fugaku-gpt sweep resume {shlex.quote(str(out))}")
    lines.append(f"to follow: fugaku-gpt sweep status {shlex.quote(str(out))}")
    return "\n".join(lines)


def _print_jobs(expanded: Sweep, standings: Sequence["Standing"], planned: Sequence["Planned"]) -> None:
    for number, one in enumerate(planned, start=1):
        click.echo(f"==> [{number}/{len(planned)}] {one.run.name}: {_job_words(one)}")
        if one.job is None:
            continue
        for note in one.job.notes:
            click.echo(f"note: {note}")
        click.echo(f"{one.job.directory}/{one.job.script}:")
        click.echo(one.job.text)
    refused = [run for run in expanded.runs if run.config is None]
    for run_ in refused:
        click.echo(f"==> {run_.name}: refused: {run_.refusal}")
    others = len(standings) - len(planned) - len(refused)
    kept = f"; {others} with a result or a job stay as they are" if others else ""
    click.echo(f"total: {_sum_words(planned)}, {len(refused)} refused{kept}; nothing was written")


def _job_words(planned: "Planned") -> str:
    if planned.job is None:
        return f"refused: {planned.refusal}"
    job = planned.job.config.job
    limit = f"at most {format_duration(job.elapse)}" if job.elapse is not None else "no time limit"
    hours = f"{planned.job.node_hours:.4g} node-hours" if planned.job.node_hours is not None else "node-hours not known"
    more = (f", sub-jobs {job.bulk}" if job.bulk else "") + (f", {job.chain} links" if job.chain > 1 else "")
    return f"{job.scheduler}, {job.nodes} {'node' if job.nodes == 1 else 'nodes'}, {limit}{more}, {hours}"


def _sum_words(planned: Sequence["Planned"]) -> str:
    jobs = [one.job for one in planned if one.job is not None]
    hours = [job.node_hours for job in jobs if job.node_hours is not None]
    words = f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}, {sum(hours):.4g} node-hours"
    endless = len(jobs) - len(hours)
    return words + (f" and {endless} without a time limit (job.elapse)" if endless else "")


def _plan_and_folder(target: Path, out: Optional[Path], overrides: Tuple[str, ...]) -> Tuple[Plan, Path]:
    """The plan of a sweep's folder, or of a sweep file and the folder that goes with it.

    Raises:
        UsageError: the target is neither, or a file comes without its folder.
    """
    if not target.is_dir():
        if out is None:
            raise UsageError(f"{target}: with a sweep file, name the folder of its runs with --out")
        return plan_of(target, overrides), out
    if out is not None:
        raise UsageError(f"--out {out}: {target} is the folder already; leave --out away, or name a sweep file")
    plan = read_plan(target)
    if plan is None:
        raise UsageError(
            f"{target}: no sweep was started there (it has no {PLAN_FILE}); name the sweep file, and --out"
        )
    if overrides:
        plan = Plan(plan.file, plan.name, plan.text, (*plan.overrides, *overrides), plan.base)
    return plan, target


def _overrides(overrides: Sequence[str], scheduler: Optional[str]) -> List[str]:
    return [*overrides, *([f"job.scheduler={scheduler}"] if scheduler is not None else [])]


def _stood(one: "Standing") -> Dict[str, Any]:
    total = one.run.config.training.iterations if one.run.config is not None else None
    pace = one.seconds_per_iteration
    return {
        "run": one.run.name,
        "status": one.status,
        "job": one.job_id or None,
        "iteration": f"{one.iterations}/{total}" if one.iterations and total is not None else None,
        "seconds_per_iteration": float(f"{pace:.4g}") if pace is not None else None,
        "reason": one.reason or None,
        "advice": one.advice or None,
    }


def _counts(standings: Sequence["Standing"]) -> str:
    counts: Dict[str, int] = {}
    for one in standings:
        counts[one.status] = counts.get(one.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK))


def _closing(ended: List["Ended"], total: int, out: Path) -> str:
    counts: Dict[str, int] = {}
    for one in ended:
        counts[one.result.status] = counts.get(one.result.status, 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK))
    lines = [f"{total} runs: {said}" + (f", {total - len(ended)} not started" if len(ended) < total else "")]
    if ended[-1].stopped:
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
            "nodes": "job.nodes",
        }
        shown = {column: run.written.get(key) for column, key in keys.items()}
        reason = run.refusal.replace("\n", "; ")
        return {
            "run": run.name,
            "variant": run.variant or None,
            **shown,
            "status": REFUSED,
            "digest": run.digest,
            "reason": reason,
        }
    from fugaku_gpt.jobs.submission import node_hours

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
