"""Diagnoses how a job ended, why, and what to do: by our own exit record first, then by the scheduler's codes.

The end of a job for its scheduler (``EXT``, ``COMPLETED``) never means success by itself, and a lost job stays lost:
it may have ended in any way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_USAGE, UsageError
from fugaku_gpt.jobs.failure_causes import (
    CAUSES_BY_STATE,
    MORE_MEMORY,
    NEVER,
    RESUME,
    RETRY,
    WAIT,
    Cause,
    scheduler_cause,
)
from fugaku_gpt.jobs.plain_outcome import plain_cause
from fugaku_gpt.jobs.schedulers.registry import scheduler_named, sub_job_ids
from fugaku_gpt.launch.launch_result import failure_reason, has_out_of_memory_message, log_tail
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.job import (
    ENDED,
    LOST,
    NOTHING_LEFT,
    ON_HOLD,
    OVER,
    QUEUED,
    REJECTED,
    RUNNING,
    UNKNOWN,
    ExitRecord,
    JobHistory,
    JobStatus,
    SubmittedJob,
    bulk_numbers,
    exit_records,
    read_history,
)
from fugaku_gpt.records.node_report import REPORT_FILE
from fugaku_gpt.records.run import Result, RunDirectory
from fugaku_gpt.records.summary import summarise

_LOG_FILES = 16  # log files of a job that are searched for the reason of its end
_GIB = 2**30
# the status of a bulk job is the worst of its sub-jobs
_WORST_FIRST = (
    runs.FAILED, runs.HUNG, runs.OUT_OF_MEMORY, runs.REFUSED, runs.LOST, runs.TIMEOUT, runs.INTERRUPTED, runs.OK,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job so far.

    Attributes:
        status: status of the run, one of ``records.run.STATUSES``; empty until the job is over.
        state: state of the job, one of ``records.job.STATES``; empty if nothing was submitted.
        cause: one line; empty for a job that succeeded.
        advice: what to do; empty if there is nothing to do.
        retry: ``resume``, ``retry``, ``never`` or ``wait``.
    """

    status: str
    state: str
    cause: str = ""
    advice: str = ""
    retry: str = WAIT


def job_outcome(directory: Path, status: Optional[JobStatus] = None) -> Outcome:
    """Return how the job of a run directory ended, or its state.

    For a run without a job, see :func:`fugaku_gpt.doctor.run.diagnose`.

    Args:
        status: the scheduler's status of the deciding job (:func:`deciding_job`); default: the last recorded one.

    Raises:
        UsageError: a record in the directory is damaged.
    """
    history, records = read_history(directory), exit_records(directory)
    job = deciding_job(history, records)
    if job is None:
        return _outcome_without_job(history)
    if status is None:
        status = history.statuses.get(job.job_id, JobStatus(job.job_id, UNKNOWN, reason="not asked yet"))
    outcomes = [_diagnose_evidence(evidence) for evidence in _evidence_of_job(directory, job, records, status, history)]
    if len(outcomes) == 1:
        return outcomes[0]
    if any(not outcome.status for outcome in outcomes):
        ended = sum(1 for outcome in outcomes if outcome.status)
        waiting = next(outcome for outcome in outcomes if not outcome.status)
        return replace(waiting, cause=f"{ended} of {len(outcomes)} sub-jobs have ended")
    worst = min(outcomes, key=lambda outcome: _WORST_FIRST.index(outcome.status))
    if worst.status == runs.OK:
        return worst
    matching = sum(1 for outcome in outcomes if outcome.status == worst.status)
    return replace(worst, cause=f"{matching} of {len(outcomes)} sub-jobs: {worst.cause}")


def deciding_job(history: JobHistory, records: Dict[str, ExitRecord]) -> Optional[SubmittedJob]:
    """Return the job whose end is the run's end: the first link of a chain that did not stop to be resumed.

    Later links have nothing to do, whatever their exit codes. A link that has ended without a record, as where its node
    has died, is passed over while the next one waits or runs: that writes its record and continues the run.
    """
    for job, following in zip(history.jobs, (*history.jobs[1:], None)):
        record = records.get(job.job_id)
        if record is None and following is not None and _continues(history, job, following):
            continue
        if record is None or record.exit_code != EXIT_RESUME:
            return job
    return history.jobs[-1] if history.jobs else None


def _continues(history: JobHistory, job: SubmittedJob, following: SubmittedJob) -> bool:
    """Whether the scheduler says that a job is over and that the one after it waits or runs."""
    ended, next_status = history.statuses.get(job.job_id), history.statuses.get(following.job_id)
    return (
        ended is not None
        and ended.state == ENDED
        and next_status is not None
        and next_status.state in (QUEUED, RUNNING)
    )


def record_result(directory: Path, outcome: Outcome, timestamp: float) -> Optional[Result]:
    """Write the run's result if its job is over and its ranks left none, or a less specific one.

    Each sub-job of a bulk job has a result of its own, in its own folder. Returns the result that was written, or None.

    Raises:
        UsageError: a record in the directory is damaged.
    """
    if not outcome.status:
        return None
    history, records = read_history(directory), exit_records(directory)
    job = deciding_job(history, records)
    if job is None:
        return None
    status = history.statuses.get(job.job_id, JobStatus(job.job_id, outcome.state))
    evidences = _evidence_of_job(directory, job, records, status, history)
    written = None
    for evidence in evidences:
        written = (
            _record_sub_job_result(
                evidence, outcome if len(evidences) == 1 else _diagnose_evidence(evidence), timestamp
            )
            or written
        )
    return written


@dataclass(frozen=True)
class _Evidence:
    """The evidence about one job or sub-job: its index among the sub-jobs, its exit record, the scheduler's status."""

    directory: Path
    job: SubmittedJob
    index: int
    record: Optional[ExitRecord]
    status: JobStatus

    @property
    def run(self) -> RunDirectory:
        """The directory in which the ranks leave their records."""
        if not self.job.bulk:
            return RunDirectory(self.directory)
        return RunDirectory(self.directory / f"repeat-{bulk_numbers(self.job.bulk)[self.index]}")

    @property
    def result(self) -> Optional[Result]:
        """The result that the ranks or their launcher wrote; None if there is none."""
        result = self.run.result()
        return None if result is None or result.judged else result

    def tail(self) -> List[str]:
        """Return the last lines that the job's script and its first ranks printed."""
        sub_job_id = sub_job_ids(self.job)[self.index]
        folder = self.job.start_folder(self.directory)
        return _tail_of([self.run.log_file, *scheduler_named(self.job.scheduler).output_files(folder, sub_job_id)])


def _tail_of(files: Sequence[Path]) -> List[str]:
    return [line for file in files[:_LOG_FILES] for line in log_tail(file)]


def _evidence_of_job(
    directory: Path, job: SubmittedJob, records: Dict[str, ExitRecord], status: JobStatus, history: JobHistory
) -> List[_Evidence]:
    """Return the evidence about each sub-job. The codes of a bulk job are those of its worst sub-job only."""
    evidences = []
    for index, sub_job_id in enumerate(sub_job_ids(job)):
        sub_status = status
        if job.bulk:
            sub_status = history.statuses.get(
                sub_job_id, JobStatus(sub_job_id, status.state, reason=status.reason, group=status.group)
            )
        evidences.append(_Evidence(directory, job, index, records.get(sub_job_id), sub_status))
    return evidences


def _outcome_without_job(history: JobHistory) -> Outcome:
    if history.open:
        intent = history.open[0]
        return Outcome(
            "",
            UNKNOWN,
            f"perhaps submitted to {intent.scheduler}: the submission has not ended, or was killed",
            f"`fugaku-gpt job status` looks for the job by its tag {intent.tag}",
        )
    if history.refused:
        return Outcome(
            "", "", f"not submitted: {history.refused.splitlines()[0]}", "correct it and submit it again", RETRY
        )
    return Outcome("", "", "not submitted", "`fugaku-gpt job submit` submits it", RETRY)


def _diagnose_evidence(evidence: _Evidence) -> Outcome:
    record, status = evidence.record, evidence.status
    over = status.state in OVER
    # a record that names a signal is written when the job receives it, and again when the job ends
    if not over and (record is None or record.signal or evidence.job.folder):
        return _unfinished_outcome(status)
    state = status.state if over else "ended"
    if evidence.job.folder:
        end_cause = plain_cause(evidence.job.scheduler, status, evidence.tail)
    else:
        end_cause = _find_cause(evidence)
    return Outcome(end_cause.status, state, end_cause.cause, end_cause.advice, end_cause.retry)


def outcome_of_other_job(scheduler: str, status: JobStatus, output: Sequence[Path]) -> Outcome:
    """Return how a job ended that no directory has a record of, or its state.

    Args:
        output: its output files, as far as they are known.
    """
    if status.state not in OVER:
        return _unfinished_outcome(status)
    end_cause = plain_cause(scheduler, status, lambda: _tail_of(output))
    return Outcome(end_cause.status, status.state, end_cause.cause, end_cause.advice, end_cause.retry)


def _unfinished_outcome(status: JobStatus) -> Outcome:
    advice = ""
    if status.state == ON_HOLD:
        advice = "`fugaku-gpt job release` lets it run"
        if status.raw == "ERR":
            advice = "cancel it: PJM keeps a job in this state until then"
    elif status.state == UNKNOWN:
        advice = "ask again later"
    return Outcome("", status.state, status.reason, advice, WAIT)


def _find_cause(evidence: _Evidence) -> Cause:
    record, result = evidence.record, evidence.result
    reported = scheduler_cause(evidence.job.scheduler, evidence.status)
    exit_code = record.exit_code if record is not None else evidence.status.exit_code
    if exit_code == NOTHING_LEFT:  # of a link that has done all; its record has 0
        exit_code = EXIT_OK
    if record is None and evidence.status.state == LOST:
        if result is not None and result.status == runs.OK:
            return Cause(runs.OK, "", "", NEVER)
        cause = evidence.status.reason or "the scheduler no longer knows the job"
        advice = "no record says how it ended: look at `fugaku-gpt job logs`, then `fugaku-gpt job resume`"
        return Cause(runs.LOST, cause, advice, RETRY)
    if exit_code == EXIT_RESUME and evidence.status.state != REJECTED:
        why = reported.cause if reported is not None else "it has stopped before its end"
        return Cause(runs.INTERRUPTED, f"{why}; it can be resumed", "`fugaku-gpt job resume` continues it", RESUME)
    if record is None and reported is not None:
        return _with_figures(evidence, reported)
    killed = record is None and evidence.status.signal is not None
    if exit_code == 0 and not killed:
        return _ended_well(evidence, result)
    if record is None and exit_code is None and not killed:
        cause = f"{evidence.status.raw or 'ended'}, and neither an exit record nor a code says how"
        return _ranks_cause_or(result, Cause(runs.FAILED, cause, "look at `fugaku-gpt job logs`", RETRY))
    if reported is not None:
        return _with_figures(evidence, reported)
    if record is not None and record.signal:
        cause = f"stopped by SIG{record.signal}"
        return Cause(runs.INTERRUPTED, cause, "resume it", RESUME)
    return _ended_badly(evidence, exit_code, result)


def _ended_well(evidence: _Evidence, result: Optional[Result]) -> Cause:
    if result is None and (evidence.run.path / REPORT_FILE).exists():  # its ranks measured nodes, and trained nothing
        return Cause(runs.OK, "", "", NEVER)
    if result is None:
        cause = _joined("exit code 0, but no result was recorded", failure_reason(evidence.tail()))
        return Cause(runs.FAILED, cause, "look at `fugaku-gpt job logs`", NEVER)
    if result.status == runs.OK:
        return Cause(runs.OK, "", "", NEVER)
    return Cause(result.status, result.reason, "look at `fugaku-gpt job logs`", NEVER)


def _ended_badly(evidence: _Evidence, exit_code: Optional[int], result: Optional[Result]) -> Cause:
    number = evidence.status.signal
    summary = f"signal {number}" if number and exit_code in (None, 0) else f"exit code {exit_code}"
    tail = evidence.tail()
    if (result is not None and result.status == runs.OUT_OF_MEMORY) or has_out_of_memory_message(tail):
        reason = result.reason if result is not None and result.reason else failure_reason(tail)
        return _with_figures(evidence, Cause(runs.OUT_OF_MEMORY, _joined("out of memory", reason), MORE_MEMORY, NEVER))
    if result is not None and result.status == runs.TIMEOUT:
        return _with_figures(
            evidence, replace(CAUSES_BY_STATE["TIMEOUT"], cause=f"time limit reached: {result.reason}")
        )
    if result is not None and result.status == runs.INTERRUPTED:
        return Cause(runs.INTERRUPTED, result.reason, "resume it", RESUME)
    advice = "remove the cause, then `fugaku-gpt job resume --force`"
    if exit_code == EXIT_USAGE and not evidence.run.metrics("iteration"):
        return Cause(runs.REFUSED, failure_reason(tail) or summary, advice, NEVER)
    status, reason = runs.FAILED, failure_reason(tail)
    if result is not None and result.status != runs.OK:
        status, reason = result.status, result.reason
    return Cause(status, _joined(summary, reason), advice, NEVER)


def _with_figures(evidence: _Evidence, end_cause: Cause) -> Cause:
    """Return a cause with figures of this run: its progress or its memory use."""
    if end_cause.status == runs.TIMEOUT:
        return replace(end_cause, cause=_joined(end_cause.cause, _progress(evidence)), advice=_time_advice(evidence))
    if end_cause.status == runs.OUT_OF_MEMORY:
        return replace(end_cause, cause=_joined(end_cause.cause, _memory(evidence)))
    return end_cause


def _ranks_cause_or(result: Optional[Result], otherwise: Cause) -> Cause:
    if result is None:
        return otherwise
    if result.status == runs.OK:
        return Cause(runs.OK, "", "", NEVER)
    return replace(otherwise, status=result.status, cause=result.reason)


def _progress(evidence: _Evidence) -> str:
    lines, config = evidence.run.metrics("iteration"), _config(evidence.directory)
    if not lines or config is None:
        return ""
    return f"{lines[-1]['iteration']} of {config.training.iterations} iterations"


def _time_advice(evidence: _Evidence) -> str:
    """Return the advice for a run that reached its time limit: the checkpoint from which it can continue."""
    checkpoint = evidence.run.last_checkpoint()
    if checkpoint:
        return f"`fugaku-gpt job resume` continues from {checkpoint}"
    config = _config(evidence.directory)
    current = (
        f" (now {format_duration(config.job.elapse)})" if config is not None and config.job.elapse is not None else ""
    )
    return (
        f"raise job.elapse{current} or job.stop_margin, then `fugaku-gpt job resume`: it begins anew, as there is no "
        "checkpoint"
    )


def _memory(evidence: _Evidence) -> str:
    lines = evidence.run.metrics("iteration")
    largest = max((line["rss_max_bytes"] for line in lines if line.get("rss_max_bytes")), default=0)
    used = max((line["node_used_bytes"] for line in lines if line.get("node_used_bytes")), default=0)
    figures = [f"largest rank {largest / _GIB:.1f} GiB"] if largest else []
    return ", ".join([*figures, *([f"node {used / _GIB:.1f} GiB in use"] if used else [])])


def _joined(summary: str, detail: str) -> str:
    return f"{summary}: {detail}" if detail else summary


def _config(directory: Path) -> Optional[RunConfig]:
    file = directory / "config.yaml"
    try:
        return _read_config(file, file.stat().st_mtime_ns)
    except (OSError, UsageError):  # the configuration improves advice only
        return None


@lru_cache(maxsize=16)
def _read_config(file: Path, _changed: int) -> RunConfig:
    """Load the configuration, once for an outcome and its result."""
    return load_run_config(file)


def _record_sub_job_result(evidence: _Evidence, outcome: Outcome, timestamp: float) -> Optional[Result]:
    run = evidence.run
    present = run.result()
    if present is not None and not present.judged and not _is_more_specific(outcome.status, present.status):
        return None
    lines, config = run.metrics("iteration"), _config(evidence.directory)
    record = evidence.record
    started = float(record.started) if record is not None else evidence.job.time
    result = Result(
        status=outcome.status,
        reason="" if outcome.status == runs.OK else outcome.cause,
        started=present.started if present is not None else started,
        ended=present.ended if present is not None else float(record.ended) if record is not None else timestamp,
        iterations=lines[-1]["iteration"] if lines else 0,
        summary=summarise(config, lines, run.metrics("validation")) if lines and config is not None else {},
        judged=True,
        # what a rank has recorded of its failure stays: the job's end tells no rank
        rank=present.rank if present is not None else None,
        node=present.node if present is not None else "",
        exception=present.exception if present is not None else "",
        last_checkpoint=(present.last_checkpoint if present is not None else "") or run.last_checkpoint(),
    )
    if present == result:
        return None
    run.path.mkdir(exist_ok=True)
    run.write_result(result)
    return result


def _is_more_specific(from_job: str, recorded: str) -> bool:
    """Whether the job's end names the cause of an end that its launcher could only record as stopped or failed."""
    failure_causes: Tuple[str, ...] = (runs.TIMEOUT, runs.OUT_OF_MEMORY)
    return from_job in failure_causes and recorded in (runs.INTERRUPTED, runs.FAILED)
