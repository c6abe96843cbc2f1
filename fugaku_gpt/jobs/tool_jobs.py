"""Jobs of other tools on PJM, such as workflow managers: their scripts, their submission, and how they ended.

A tool brings options of ``pjsub`` and commands. The script that is made of them records how it ended, in ``exit/`` of a
folder of the tool's, as every script of ours does: that record decides first, then PJM's codes, since a job that PJM is
done with has not succeeded by that. The distributions in ``integrations/`` stand on this module.
"""

from __future__ import annotations

import re
import shlex
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.before_submission import check_script
from fugaku_gpt.jobs.directives import directive_value
from fugaku_gpt.jobs.plain_outcome import plain_cause
from fugaku_gpt.jobs.schedulers.commands import CommandResult, run_command
from fugaku_gpt.jobs.schedulers.pjm import RETRY_SECONDS, PjmScheduler
from fugaku_gpt.jobs.schedulers.protocol import Submission
from fugaku_gpt.jobs.submission import TAG_PREFIX
from fugaku_gpt.launch.launch_result import log_tail
from fugaku_gpt.pjm.pjstat import parse_data, status_of
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.files import remove_file, write_bytes_atomically
from fugaku_gpt.records.job import CANCELLED, LOST, OVER, UNKNOWN, ExitRecord, JobStatus, exit_record, exit_record_file

# A job that PJM does not know may be known again a moment later: after its submission, or when pjstat has hung.
LOST_SECONDS = 300.0
_NAME_LENGTH = 63  # bytes of a job's name
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DELETED = 1  # PJM's code for a job that pjdel has ended
_RECORD = r"""
sub_job=${PJM_SUBJOBID:-$PJM_JOBID}
started=$(date +%s)
stop_signal=''
write_exit_record() {
  mkdir -p "$records" &&
    printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "%s", "started": %d, "ended": %d, "host": "%s"}\n' \
      "$PJM_JOBID" "$sub_job" "$1" "$stop_signal" "$started" "$(date +%s)" "${HOSTNAME:-unknown}" > "$records/.$sub_job.tmp" &&
    mv -f "$records/.$sub_job.tmp" "$records/$sub_job.json"
}
trap 'write_exit_record "$?"' EXIT
trap 'stop_signal=TERM; exit 143' TERM
trap 'stop_signal=XCPU; exit 152' XCPU
"""  # noqa: E501


@dataclass(frozen=True)
class ToolScript:
    """A job of another tool.

    Attributes:
        name: name of the job; see :func:`job_name`.
        options: options of ``pjsub`` with their values, such as ``("-L", "node=4")``; an empty value is none.
        directives: further options as they stand on a ``#PJM`` line, such as ``-L freq=2000,eco_state=0``.
        commands: lines of bash; the exit code of the last one is that of the job.
    """

    name: str
    options: Sequence[Tuple[str, str]]
    commands: Sequence[str]
    directives: Sequence[str] = ()

    def text(self, folder: Path) -> str:
        """Return the script, whose record of its end will be in ``exit/`` of a folder.

        Raises:
            UsageError: an option has a character that cannot stand in a script's directives.
        """
        lines = ["#!/bin/bash", f"#PJM -N {directive_value(self.name)}"]
        lines += [
            f"#PJM {option} {directive_value(value)}" if value else f"#PJM {option}" for option, value in self.options
        ]
        for directive in self.directives:
            if _CONTROL.search(directive):
                raise UsageError(f"{directive!r}: options of pjsub must be on one line")
            lines.append(f"#PJM {directive}")
        lines.append(f"\nrecords={shlex.quote(str(folder / 'exit'))}{_RECORD}")
        return "\n".join([*lines, *self.commands]) + "\n"


@dataclass(frozen=True)
class JobEnd:
    """How a job of another tool ended.

    Attributes:
        is_success: whether its commands ended with exit code 0.
        is_cancelled: whether it was cancelled.
        exit_code: exit code of its commands; None if it is not known.
        reason: one line; empty for success.
    """

    is_success: bool
    is_cancelled: bool = False
    exit_code: Optional[int] = None
    reason: str = ""


@dataclass(frozen=True)
class PolledJob:
    """A job of another tool as it is now: PJM's status, and its end, None as long as that is open."""

    status: JobStatus
    end: Optional[JobEnd] = None


def job_name(text: str) -> str:
    """Return a name that PJM accepts: 63 characters of letters, digits, ``.``, ``_`` and ``-``, a letter first."""
    name = _NOT_IN_NAMES.sub("_", text).strip("_") or "job"
    return (name if name[0].isalpha() else f"job_{name}")[:_NAME_LENGTH]


@dataclass
class ToolJobs:
    """Writes, submits, polls and cancels jobs of another tool.

    Attributes:
        folder: folder whose ``exit/`` has the records of how jobs ended, on a file system that nodes see.
        scheduler: PJM, by its commands on PATH.
        lost_seconds: time for which a job that PJM does not know, and that has left no record, counts as open.
        clock: seconds of a clock that only goes forward.
        sleep: called to wait between attempts.
    """

    folder: Path
    scheduler: PjmScheduler = field(default_factory=PjmScheduler)
    lost_seconds: float = LOST_SECONDS
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lost_since: Dict[str, float] = field(default_factory=dict, repr=False)

    def write(self, script: ToolScript, path: Path, is_linted: bool = True) -> List[str]:
        """Write a script; return the warnings of ``job lint``, one line each.

        Args:
            is_linted: whether it is checked by the rules for Fugaku; else the list is empty.

        Raises:
            UsageError: PJM would refuse the script, or the file cannot be written.
        """
        text = script.text(self.folder)
        warnings = check_script(text, "pjm", str(path)) if is_linted else []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(path, text.encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
        return warnings

    def submit(self, path: Path, start: Path, name: str) -> str:
        """Submit a script that starts in a folder; return the job's id.

        Where ``pjsub`` gives no clear answer, the job is looked for by its comment: nothing is submitted twice.

        Raises:
            Refused: there is no job; the message is PJM's, with advice.
            Uncertain: there may be one; the message names the comment by which it can be recognised.
        """
        submission = Submission(str(path), start, name, tag=TAG_PREFIX + uuid.uuid4().hex)
        try:
            return self.scheduler.submit(submission)
        except Uncertain as error:
            for pause in RETRY_SECONDS:
                self.sleep(pause)
                try:
                    job_ids = self.scheduler.find([submission.tag])
                except UsageError:  # PJM still does not answer
                    continue
                if submission.tag in job_ids:
                    return job_ids[submission.tag]
            raise Uncertain(
                f"{error}\nbefore you submit {name} again, look for a job with the comment {submission.tag}: "
                "pjstat --data --choose jid,cmt"
            ) from None

    def poll(self, job_ids: Sequence[str], outputs: Optional[Mapping[str, Path]] = None) -> Dict[str, PolledJob]:
        """Return job id → how it is now, with one query for all.

        Args:
            outputs: job id → file of its output, in which the reason of a failure is looked for.

        Raises:
            UsageError: there is no ``pjstat`` on this machine.
        """
        statuses = self.scheduler.poll(job_ids)
        return {
            job_id: PolledJob(statuses[job_id], self._end_of(statuses[job_id], (outputs or {}).get(job_id)))
            for job_id in job_ids
        }

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """Cancel jobs; return job id → why it was not cancelled, for those that may still run.

        Raises:
            UsageError: there is no ``pjdel`` on this machine, or it does not answer.
        """
        refusals = self.scheduler.cancel(job_ids)
        return {job_id: why for job_id, why in refusals.items() if why and not self.scheduler.is_gone(why)}

    def forget(self, job_id: str) -> None:
        """Remove the record of how a job ended, once that has been read: another simulated PJM may give its id again.

        Raises:
            UsageError: it cannot be removed.
        """
        remove_file(exit_record_file(self.folder, job_id))

    def present_jobs(self) -> List[str]:
        """Return the ids of all jobs of this user that wait or run, whoever submitted them.

        Raises:
            UsageError: there is no ``pjstat`` on this machine, or it does not answer.
        """
        answer: CommandResult = run_command(["pjstat", "--data", "--choose", "jid,st"])
        if answer.code != 0:
            raise UsageError(f"pjstat: {answer.message or f'exit code {answer.code}'}")
        statuses = [status_of(row) for row in parse_data(answer.out)]
        return [status.job_id for status in statuses if status is not None]

    def _end_of(self, status: JobStatus, output: Optional[Path]) -> Optional[JobEnd]:
        try:
            record = exit_record(self.folder, status.job_id)
        except UsageError:  # it is damaged, and says nothing; of this job alone
            record = None
        if status.state != LOST:
            self._lost_since.pop(status.job_id, None)
        if status.state == UNKNOWN or (status.state == LOST and record is not None):
            return self._recorded_end(status, record, output) if record is not None else None
        if status.state == LOST:
            now = self.clock()
            if now - self._lost_since.setdefault(status.job_id, now) < self.lost_seconds:
                return None
        if status.state not in OVER:
            return None
        return self._recorded_end(status, record, output)

    @staticmethod
    def _recorded_end(status: JobStatus, record: Optional[ExitRecord], output: Optional[Path]) -> JobEnd:
        if record is not None and record.exit_code == 0 and not record.signal:
            return JobEnd(True, exit_code=0)
        if record is not None:
            state = "ended" if status.state in (LOST, UNKNOWN) else status.state  # the record says that it has ended
            status = replace(status, exit_code=record.exit_code, state=state)
        cause = plain_cause("pjm", status, lambda: log_tail(output) if output is not None else [])
        if cause.status == runs.OK:
            return JobEnd(True, exit_code=status.exit_code)
        is_cancelled = status.state == CANCELLED or status.code == _DELETED
        return JobEnd(False, is_cancelled, status.exit_code, cause.cause)
