"""Jobs: their scripts, what these ask for and get wrong, submission, and what became of a submitted job."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from fugaku_gpt.api.runs import Run
from fugaku_gpt.api.settings import FilePath
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.jobs import submission
from fugaku_gpt.jobs.before_submission import check_run_script, check_script
from fugaku_gpt.jobs.change import CANCEL, change_jobs
from fugaku_gpt.jobs.outcome import Outcome
from fugaku_gpt.jobs.plain_script import is_plain_script, read_plain_script, submit_plain_script
from fugaku_gpt.jobs.poll import PolledRun, only_run_directory, output_of, poll_runs, watch_runs
from fugaku_gpt.jobs.render import JobScript, job_name, render_from_files
from fugaku_gpt.jobs.run_job import default_directory, job_of_run
from fugaku_gpt.jobs.schedulers.registry import scheduler_named
from fugaku_gpt.jobs.script_document import script_document
from fugaku_gpt.pjm.lexer import read_script, read_script_file
from fugaku_gpt.pjm.lint.engine import FileReport
from fugaku_gpt.pjm.lint.files import lint_files, linter_for
from fugaku_gpt.pjm.lint.sites import AUTO
from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large
from fugaku_gpt.records.job import read_history
from fugaku_gpt.records.run import OK, Result, RunDirectory

__all__ = ["FileReport", "Job", "JobScript", "Outcome", "lint", "parse_script", "render_job", "submit"]


def render_job(run: Run, *, scheduler: Optional[str] = None) -> JobScript:
    """The job script of a run, as ``fugaku-gpt job render`` prints it; nothing is written or submitted.

    Args:
        scheduler: ``pjm``, ``slurm`` or ``local``; default: that of the run.

    Returns:
        Its text, and notes on what the scheduler cannot express and what was chosen.

    Raises:
        UsageError: the run does not fit into the memory of its nodes, or cannot be expressed as a job.
    """
    config, chosen = job_of_run(run.source, _scheduler_override(scheduler))
    refuse_job_too_large(config)
    return render_from_files(config, chosen)


def parse_script(script: FilePath) -> Dict[str, Any]:
    """Read what a ``#PJM`` script requests, as pjsub does: the document of ``fugaku-gpt job parse``.

    Args:
        script: the path of a script, or its text, which has more than one line.

    Raises:
        UsageError: the file cannot be read.
    """
    if isinstance(script, str) and "\n" in script:
        return script_document(read_script(script))
    return {"file": os.fspath(script), **script_document(read_script_file(Path(script)))}


def lint(
    scripts: Union[FilePath, Sequence[FilePath]],
    *,
    site: str = AUTO,
    strict: bool = False,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    limits: Optional[FilePath] = None,
) -> List[FileReport]:
    """The findings of ``fugaku-gpt job lint`` in scripts, and in those in folders.

    Args:
        scripts: a path, or several; or the text of one script, which has more than one line.
        site: the site that they are for; ``auto`` decides for each script by its directives.
        strict: whether what depends on the day, or on the command line of pjsub, is an error.
        select, ignore: ids of rules, which may be shortened; all, and none.
        limits: file of a site's limits, in place of those of the package.

    Raises:
        UsageError: an id is unknown, or a file cannot be read.
    """
    linter = linter_for(site, Path(limits) if limits is not None else None, strict, select, ignore)
    if isinstance(scripts, str) and "\n" in scripts:
        return [linter.check(scripts)]
    paths = [scripts] if isinstance(scripts, (str, os.PathLike)) else list(scripts)
    reports, unreadable = lint_files(linter, [os.fspath(path) for path in paths])
    if unreadable:
        raise UsageError("\n".join(unreadable))
    return reports


def submit(run: Union[Run, FilePath], out: Optional[FilePath] = None, *, scheduler: Optional[str] = None) -> "Job":
    """Submit the job of a run, or a script, as ``fugaku-gpt job submit`` does, and return at once.

    Args:
        run: a run; or the path of a run directory that was prepared, with ``config.yaml`` and ``job.sh``; or that of a
            script of any kind, which starts in the present folder. A sweep is submitted by ``Sweep.submit``.
        out: run directory, or for a script the folder with the record of its job; default: ``runs/NAME-TIME``.
        scheduler: ``pjm``, ``slurm`` or ``local``; default: that of the run, or of the script's directives.

    Raises:
        UsageError: it was not submitted: it does not fit, lacks something, `job lint` finds an error in its script, or
            the scheduler refuses it.
        Uncertain: the scheduler may have accepted it; ``Job.in_directory(out).outcome()`` finds out.
    """
    if not isinstance(run, Run) and is_plain_script(Path(run)):
        return _submit_script(Path(run), out, scheduler)
    if not isinstance(run, Run):
        if out is not None or scheduler is not None:
            raise UsageError(f"{os.fspath(run)}: is prepared: out and scheduler are for a run")
        prepared = submission.load_prepared(Path(run))
        refuse_job_too_large(prepared.config)
        warnings = _checked(prepared)
    else:
        config, chosen = job_of_run(run.source, _scheduler_override(scheduler))
        render = functools.partial(render_from_files, notes=chosen)
        refuse_job_too_large(config)
        directory = Path(out) if out is not None else default_directory(job_name(config))
        warnings = _checked(submission.plan_job(config, directory, render))
        prepared = submission.prepare_job(config, directory, render)
    submission.submit(prepared, scheduler_named(prepared.config.job.scheduler))
    return Job(prepared.directory, notes=(*warnings, *prepared.notes))


def _submit_script(path: Path, out: Optional[FilePath], scheduler: Optional[str]) -> "Job":
    script = read_plain_script(path, scheduler)
    warnings = check_script(script.text, script.scheduler, str(script.path))
    record = Path(out) if out is not None else default_directory(script.name)
    submit_plain_script(script, record, scheduler_named(script.scheduler))
    return Job(record, notes=tuple(warnings))


def _checked(prepared: submission.PreparedJob) -> Tuple[str, ...]:
    path = str(prepared.directory / prepared.script)
    return tuple(check_run_script(prepared.config, prepared.text, path))


def _scheduler_override(scheduler: Optional[str]) -> List[str]:
    return [f"job.scheduler={scheduler}"] if scheduler is not None else []


@dataclass(frozen=True)
class Job:
    """The job of a run directory; of a chain, all of its links. Or that of a script, which has no result of a run.

    Attributes:
        directory: the run directory, or the folder with the record of a script's job.
        notes: what `job lint` warns of in its script, and what was chosen for it, if it was just submitted.
    """

    directory: Path
    notes: Tuple[str, ...] = ()

    @classmethod
    def in_directory(cls, directory: FilePath) -> "Job":
        """The job that was submitted in a run directory, by whatever program.

        Raises:
            UsageError: the folder has none, or several.
        """
        return cls(only_run_directory(Path(directory)))

    @property
    def ids(self) -> Tuple[str, ...]:
        """The ids of its jobs, one for each link of a chain."""
        return tuple(job.job_id for job in read_history(self.directory).jobs)

    def outcome(self) -> Outcome:
        """The state of the job, or how it ended: the scheduler is asked once, and what changed is recorded."""
        return self._polled().outcome

    def output(self) -> List[Path]:
        """The files of its output that are there."""
        return output_of(self._polled())

    def wait(self, timeout: Optional[float] = None) -> Outcome:
        """Wait until the job has ended. Stopping to wait has no effect on it.

        Args:
            timeout: seconds to wait; default: for ever.

        Raises:
            TimeoutError: the job has not ended by then.
        """
        deadline = time.monotonic() + timeout if timeout is not None else None

        def sleep(seconds: float) -> None:
            left = deadline - time.monotonic() if deadline is not None else seconds
            if left <= 0:
                raise TimeoutError(f"{self.directory}: the job has not ended within {timeout:g} s")
            time.sleep(min(seconds, left))

        *_, (last,) = watch_runs([self.directory], sleep=sleep)
        return last.outcome

    def result(self, timeout: Optional[float] = None) -> Result:
        """Wait until the job has ended, and return the result of its run.

        Raises:
            RunFailed: it did not end well; the text has the cause, and what to do.
            TimeoutError: it has not ended within ``timeout`` seconds.
            UsageError: its result is damaged, or missing although it ended well, as of a script: use ``wait``.
        """
        outcome = self.wait(timeout)
        if outcome.status != OK:
            reason = "; ".join(text for text in (outcome.cause, outcome.advice) if text)
            raise RunFailed(f"{self.directory}: {outcome.status or outcome.state}: {reason}")
        result = RunDirectory(self.directory).result()
        if result is None:
            raise UsageError(f"{self.directory}: its job has ended well, and there is no result.json")
        return result

    def cancel(self) -> Dict[str, str]:
        """Ask the scheduler to cancel its jobs that are not over; returns id → why it refused, empty if it accepted.

        Raises:
            UsageError: none is waiting or running.
            RunFailed: a submission is not over, or was killed just now.
        """
        refusals: Dict[str, str] = {}
        for answer in change_jobs([self.directory], (), CANCEL):
            if not answer.job_id:
                raise RunFailed(f"{self.directory}: {answer.refusal}")
            refusals[answer.job_id] = answer.refusal
        return refusals

    def _polled(self) -> PolledRun:
        return poll_runs([self.directory])[0]
