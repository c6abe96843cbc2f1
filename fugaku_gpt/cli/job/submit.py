"""``fugaku-gpt job submit|resume``: submit jobs, and submit again those that stopped."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.options import PATH, run_source, scheduler_option, scheduler_overrides
from fugaku_gpt.cli.output import echo, echo_script
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import UsageError

if TYPE_CHECKING:
    from fugaku_gpt.jobs.poll import PolledRun
    from fugaku_gpt.jobs.submission import PreparedJob

_yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation on a terminal.")


@click.command()
@run_source(metavar="[RUN.yaml|DIR|SCRIPT]", settings_help="Override a setting, such as job.nodes=384; repeatable.")
@scheduler_option()
@click.option("--out", type=PATH, help="Run directory; default: a new one under runs/.")
@click.option("--dry-run", is_flag=True, help="Show script, command and node-hours; write and submit nothing.")
@click.option("--wait", is_flag=True, help="Wait until the job has ended; its exit code is 1 if it did not end well.")
@_yes_option
def submit(
    source: RunSource, scheduler: Optional[str], out: Optional[Path], dry_run: bool, wait: bool, yes: bool
) -> None:
    """Submit the job of RUN.yaml, of a prepared run directory DIR, or a SCRIPT of any kind.

    Nothing waits for the job, unless --wait asks for it: then each change of it is a line on standard error. Whoever
    stops or kills the waiting command leaves the job alone.

    config.yaml and job.sh are written into the run directory, in which the job starts. Job ids are printed, one for
    each link of a chain. Refused are a run that does not fit into the memory of its nodes, one without a corpus or,
    for PJM, a group, one whose files (corpus, tar file, files to transfer) are not there, and a script in which
    `job lint` finds an error.

    A SCRIPT with #PJM or #SBATCH lines is submitted as it is, after `job lint`, and starts in the present folder. Its
    record is in --out, by default a new folder under runs/, so that `job status`, `job logs` and `job cancel` know it.

    Exit codes: 0 submitted (with --wait: and ended well), 1 it may have been submitted, or with --wait
    did not end well, 2 not submitted.
    """
    if wait and dry_run:
        raise UsageError("--wait waits for a job, and --dry-run submits none: leave one of them out")
    record = _submit_source(source, scheduler, out, dry_run, yes)
    if wait and record is not None:
        _wait(record)


def _submit_source(
    source: RunSource, scheduler: Optional[str], out: Optional[Path], dry_run: bool, yes: bool
) -> Optional[Path]:
    """Submit a job; return the folder with its record, or None if nothing was submitted."""
    from fugaku_gpt.jobs import submission
    from fugaku_gpt.jobs.plain_script import is_plain_script
    from fugaku_gpt.jobs.render import job_name, render_from_files
    from fugaku_gpt.jobs.run_job import default_directory, job_of_run
    from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large

    target = source.run_file
    if target is not None and is_plain_script(target):
        return _submit_script(source, scheduler, out, dry_run)
    if target is not None and target.is_dir():
        if source.preset is not None or source.settings or scheduler is not None or out is not None:
            raise UsageError(f"{target}: is prepared: --preset, --set, --scheduler and --out are for a run file")
        prepared = submission.load_prepared(target)
        refuse_job_too_large(prepared.config)
        if dry_run:
            _show_plan(prepared)
            return None
        _check(prepared)
    else:
        config, chosen = job_of_run(source, scheduler_overrides(scheduler))
        render = functools.partial(render_from_files, notes=chosen)
        refuse_job_too_large(config)
        directory = out if out is not None else default_directory(job_name(config))
        if dry_run:
            _show_plan(submission.plan_job(config, directory, render))
            return None
        planned = submission.plan_job(config, directory, render)
        _check(planned)
        if not _confirmed([planned], yes):
            return None
        prepared = submission.prepare_job(config, directory, render)
        yes = True
    if not _confirmed([prepared], yes):
        return None
    _submit(prepared)
    return prepared.directory


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option("--force", is_flag=True, help="Also submit runs that would fail the same way again, or that ended well.")
@click.option(
    "--exclude-node",
    "nodes",
    metavar="NODE",
    multiple=True,
    help="A node that the job must not get, such as one that computes wrongly; repeatable. Slurm only.",
)
@click.option("--dry-run", is_flag=True, help="Only report what would be submitted.")
@_yes_option
def resume(directories: Tuple[Path, ...], force: bool, nodes: Tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Submit again the runs in DIR that stopped and can be resumed, or that failed through no fault of their own.

    DIR is a run directory or a folder of them. A run resumes from its newest valid checkpoint, or starts from the
    beginning if it has none. The output of earlier jobs is moved to attempts/ beside the run directory. Jobs that are
    still waiting or running are refused; so is a lost job that cannot be cancelled, as it may still run. Of several
    runs, those that cannot be submitted are left out.

    Slurm gives the job none of the nodes of --exclude-node; PJM and this machine have nothing of the kind, and refuse
    it.

    Exit codes: 0 submitted, 1 it may have been submitted, 2 not submitted: no run can be submitted again, or a lost job
    could not be cancelled.
    """
    from fugaku_gpt.jobs.poll import job_directories, poll_runs
    from fugaku_gpt.jobs.schedulers.registry import scheduler_named
    from fugaku_gpt.jobs.submission import load_prepared, require_exclusion

    runs = poll_runs(job_directories(directories))
    chosen = [run for run in runs if _may_resume(run, force, is_only_target=len(runs) == 1)]
    if not chosen:
        raise UsageError(f"none of {len(runs)} runs can be submitted again; the lines above say why")
    for run in chosen:
        echo(f"{run.directory}: {run.outcome.retry}: {run.outcome.cause or run.outcome.status}", err=True)
    prepared = [load_prepared(run.directory) for run in chosen]
    for job in prepared:
        require_exclusion(scheduler_named(job.config.job.scheduler), nodes)
        _check(job)
    if dry_run or not _confirmed(prepared, yes):
        return
    refused = [run for run in chosen if not _resume(run, nodes)]
    if refused:
        raise UsageError(f"not submitted: {', '.join(str(run.directory) for run in refused)}")


def _submit_script(
    source: RunSource, scheduler_name: Optional[str], out: Optional[Path], dry_run: bool
) -> Optional[Path]:
    """Submit a script that is not of a run, or print the command that would; return the folder with its record.

    Raises:
        UsageError: options of a run file are given, lint finds an error, or the scheduler refuses the script.
    """
    import shlex

    from fugaku_gpt.jobs.before_submission import check_script
    from fugaku_gpt.jobs.plain_script import read_plain_script, submission_of, submit_plain_script
    from fugaku_gpt.jobs.run_job import default_directory
    from fugaku_gpt.jobs.schedulers.registry import scheduler_named

    assert source.run_file is not None
    if source.preset is not None or source.settings:
        raise UsageError(f"{source.run_file}: is a script: --preset and --set are for a run file")
    script = read_plain_script(source.run_file, scheduler_name)
    for warning in check_script(script.text, script.scheduler, str(script.path)):
        echo(warning, err=True)
    scheduler = scheduler_named(script.scheduler)
    if dry_run:
        echo(f"command: {shlex.join(scheduler.command_of(submission_of(script, Path.cwd())))}", err=True)
        return None
    record = out if out is not None else default_directory(script.name)
    echo(submit_plain_script(script, record, scheduler))
    echo(f"{record}: submitted; `fugaku-gpt job watch {record}` follows it", err=True)
    return record


def _wait(record: Path) -> None:
    """Wait until the job of a run directory has ended, with a line for each change on standard error.

    Raises:
        RunFailed: it did not end well.
    """
    from fugaku_gpt.cli.job.changes import print_changes, require_success
    from fugaku_gpt.jobs.poll import watch_runs

    sys.stdout.flush()  # whoever reads the job's id from a pipe need not wait for its end
    require_success(print_changes(watch_runs([record]), err=True))


def _show_plan(prepared: PreparedJob) -> None:
    import shlex
    from dataclasses import replace

    from fugaku_gpt.jobs.before_submission import check_script
    from fugaku_gpt.jobs.schedulers.registry import scheduler_named
    from fugaku_gpt.jobs.submission import TAG_PREFIX, submissions

    scheduler = scheduler_named(prepared.config.job.scheduler)
    echo_script(prepared.text)
    try:
        findings = check_script(prepared.text, scheduler.name, str(prepared.directory / prepared.script))
    except UsageError as error:  # it would not be submitted, which these lines say
        findings = [str(error)]
    for finding in findings:
        echo(finding, err=True)
    for submission in submissions(prepared):
        command = scheduler.command_of(replace(submission, tag=TAG_PREFIX + "TAG"))
        echo(f"command: cd {shlex.quote(str(prepared.directory))} && {shlex.join(command)}", err=True)
    echo(_cost_text([prepared]), err=True)
    for note in prepared.notes:
        echo(f"note: {note}", err=True)


def _check(prepared: PreparedJob) -> None:
    """Print what `job lint` warns of in a script.

    Raises:
        UsageError: the job lacks something, or its script would be refused.
    """
    from fugaku_gpt.jobs.before_submission import check_run_script

    path = str(prepared.directory / prepared.script)
    for warning in check_run_script(prepared.config, prepared.text, path):
        echo(warning, err=True)


def _cost_text(prepared: Sequence[PreparedJob]) -> str:
    hours = [job.node_hours for job in prepared]
    total = sum(hour for hour in hours if hour is not None)
    text = f"node-hours: {total:.4g} at most" if any(hour is not None for hour in hours) else "node-hours: not known"
    open_ended = sum(1 for hour in hours if hour is None)
    return text + (f"; {open_ended} without job.elapse" if open_ended else "")


def _confirmed(prepared: Sequence[PreparedJob], yes: bool) -> bool:
    """True if the jobs are to be submitted; the user is asked on a terminal only, so that scripts do not wait."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    for job in prepared:
        echo(f"{job.directory}: {job.config.job.nodes} nodes, {job.config.job.scheduler}", err=True)
        for note in job.notes:
            echo(f"note: {note}", err=True)
    return click.confirm(f"{_cost_text(prepared)}; submit?", err=True)


def _submit(prepared: PreparedJob, excluded_nodes: Sequence[str] = ()) -> None:
    from fugaku_gpt.jobs.schedulers.registry import scheduler_named
    from fugaku_gpt.jobs.submission import submit as submit_job

    for note in prepared.notes:
        echo(f"note: {note}", err=True)
    scheduler = scheduler_named(prepared.config.job.scheduler)
    ids = submit_job(prepared, scheduler, excluded_nodes=excluded_nodes)
    for job_id in ids:
        echo(job_id)
    echo(f"{prepared.directory}: submitted; `fugaku-gpt job watch {prepared.directory}` follows it", err=True)


def _resume(run: PolledRun, excluded_nodes: Sequence[str]) -> bool:
    """Submit a run again; returns False, with a message, if its lost job may still run."""
    from fugaku_gpt.jobs.submission import load_prepared, new_attempt
    from fugaku_gpt.records.job import LOST

    if run.outcome.state == LOST:  # it may exist all the same: two jobs must not write into one directory
        refusal = _refusal_to_end_lost_job(run)
        if refusal:
            echo(f"{run.directory}: not submitted: {run.job_id} may still run: {refusal}", err=True)
            return False
    if run.job_id:
        archive = new_attempt(run.directory, time.time())
        echo(f"{run.directory}: the earlier attempt is kept in {archive}", err=True)
    _submit(load_prepared(run.directory), excluded_nodes)
    return True


def _refusal_to_end_lost_job(run: PolledRun) -> str:
    """Cancel a job that its scheduler has lost; returns why it may still run, empty if it surely does not."""
    from fugaku_gpt.jobs.schedulers.registry import scheduler_named

    scheduler = scheduler_named(run.scheduler)
    try:
        refusal = scheduler.cancel([run.job_id]).get(run.job_id, "")
    except UsageError as error:
        refusal = str(error)
    return "" if scheduler.is_gone(refusal) else refusal


def _may_resume(run: PolledRun, force: bool, is_only_target: bool) -> bool:
    """True if a run is to be submitted again.

    Raises:
        UsageError: it must not be submitted; if there are several, it is left out instead.
    """
    outcome = run.outcome
    if not run.is_over or outcome.retry == "wait":
        reason = f"is {outcome.state}: cancel it, or wait for its end"
    elif outcome.retry in ("resume", "retry") or force:
        return True
    elif outcome.status == "ok":
        reason = "has ended well; --force runs it again"
    else:
        reason = f"would end the same way ({outcome.cause}): {outcome.advice or 'mend the cause'}; --force submits it"
    if is_only_target:
        raise UsageError(f"{run.directory}: {reason}")
    echo(f"{run.directory}: left out: {reason}", err=True)
    return False
