"""Slurm: ``sbatch``, ``squeue``, ``sacct`` or ``scontrol``, ``scancel``.

Each link of a chain depends on the previous one with ``afternotok``, the closest that Slurm has to "it ended with exit
code 75": the link starts when the previous one has failed, reached its time limit or lost its node, and is removed
(``--kill-on-invalid-dep``) when that one has succeeded. The next link's script itself checks whether a failed link
asked to be resumed: it reads the exit record of the job in ``SLURM_JOB_DEPENDENCY``, and ends at once with exit code 0,
which removes the later links, unless that record has 75, or is missing because the job was killed with its node.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandResult, CommandTimeout, RunCommand, run_command
from fugaku_gpt.jobs.schedulers.protocol import Accounting, JobId, Overtaken, Refused, Submission
from fugaku_gpt.records.job import (
    CANCELLED,
    ENDED,
    LOST,
    ON_HOLD,
    QUEUED,
    RUNNING,
    SUSPENDED,
    UNKNOWN,
    JobStatus,
    aggregate_status,
)

RETRY_SECONDS = (2.0, 4.0, 8.0)
_STATES = {
    "PENDING": QUEUED,
    "REQUEUED": QUEUED,
    "REQUEUE_FED": QUEUED,
    "REQUEUE_HOLD": ON_HOLD,
    "SPECIAL_EXIT": ON_HOLD,
    "RESV_DEL_HOLD": ON_HOLD,
    "CONFIGURING": RUNNING,
    "RUNNING": RUNNING,
    "COMPLETING": RUNNING,
    "SIGNALING": RUNNING,
    "STAGE_OUT": RUNNING,
    "STOPPED": SUSPENDED,
    "SUSPENDED": SUSPENDED,
    "RESIZING": RUNNING,
    "COMPLETED": ENDED,
    "FAILED": ENDED,
    "TIMEOUT": ENDED,
    "OUT_OF_MEMORY": ENDED,
    "NODE_FAIL": ENDED,
    "BOOT_FAIL": ENDED,
    "LAUNCH_FAILED": ENDED,
    "PREEMPTED": ENDED,
    "DEADLINE": ENDED,
    "REVOKED": ENDED,
    "CANCELLED": CANCELLED,
}
_HOLD_REASONS = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue")
_ID_PATTERN = r"[0-9]{1,15}(?:_[0-9]{1,10})?"
_ID = re.compile(r"([0-9]{1,15})(?:_([0-9]{1,10}))?")
_SQUEUE_ROW = re.compile(rf"^(?P<id>{_ID_PATTERN})\|(?P<state>\w+)\|(?P<group>[^|]*)\|(?P<reason>.*)$")
_SACCT_ROW = re.compile(rf"^(?P<id>{_ID_PATTERN})\|(?P<state>\w+)[^|]*\|(?P<exit>\d+:\d+)\|(?P<group>[^|]*)$")
_SCONTROL_ROW = re.compile(
    r"^JobId=(?P<job>\d+) (?:ArrayJobId=(?P<array>\d+) ArrayTaskId=(?P<task>\S+) )?.*?\bJobState=(?P<state>\w+) "
    r"Reason=(?P<reason>.*?) Dependency=.*?\bExitCode=(?P<exit>\d+:\d+) .*?\bPartition=(?P<group>\S+)"
)
_SACCT_FIELDS = ("JobID", "ElapsedRaw", "AllocNodes", "ConsumedEnergyRaw", "MaxRSS", "AveCPUFreq", "ReqCPUFreq")
_NOT_REACHED = re.compile(r"Unable to contact slurm controller|Slurm controller not responding|temporarily unavailable")
_SUBMITTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)
_TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
_ADVICE = (
    (re.compile("invalid partition", re.I), "job.resource_group names the partition; `sinfo -s` lists yours"),
    (re.compile("invalid account", re.I), "job.group names the account; `sacctmgr show associations user=$USER` lists"),
    (
        re.compile("node count|node configuration|processors requested|memory specification", re.I),
        "job.nodes, job.node_memory or the ranks per node are more than the partition has; see `sinfo`",
    ),
    (re.compile("time limit", re.I), "job.elapse is above the partition's limit; see `sinfo`"),
    (re.compile("submit limit|policy", re.I), "a limit of yours is reached: wait for jobs to end, or submit fewer"),
)


class SlurmScheduler:
    """See :class:`fugaku_gpt.jobs.schedulers.protocol.Scheduler`.

    Args:
        run: runs one command; see :func:`fugaku_gpt.jobs.schedulers.commands.run_command`.
        sleep: called to wait between attempts.
    """

    name = "slurm"
    query_command = "squeue"
    why_no_exclusion = ""

    def __init__(self, run: RunCommand = run_command, sleep: Callable[[float], None] = time.sleep) -> None:
        self._run = run
        self._sleep = sleep

    @staticmethod
    def parse_job_id(text: str) -> JobId:
        """See the protocol: ``123``, or the task ``123_4`` of an array."""
        match = _ID.fullmatch(text)
        if match is None:
            raise UsageError(f"{text[:60]!r}: not a job id of Slurm; valid: 123 or 123_4")
        number = int(match[1])
        if match[2] is None:
            return JobId(str(number), str(number), number)
        return JobId(f"{number}_{int(match[2])}", str(number), number, index=int(match[2]))

    @staticmethod
    def sub_job_id(job_id: str, index: int) -> str:
        """See the protocol."""
        return f"{job_id}_{index}"

    def command_of(self, submission: Submission) -> List[str]:
        """See the protocol; the command runs in the submission's directory."""
        argv = ["sbatch", "--parsable"]
        if submission.tag:
            argv.append(f"--comment={submission.tag}")
        if submission.excluded_nodes:
            argv.append(f"--exclude={','.join(submission.excluded_nodes)}")
        if submission.after is not None:
            argv += [f"--dependency=afternotok:{submission.after}", "--kill-on-invalid-dep=yes"]
        return [*argv, submission.script]

    def submit(self, submission: Submission) -> str:
        """See the protocol. If the controller cannot be reached, it is retried after 2, 4 and 8 seconds."""
        for wait in (*RETRY_SECONDS, None):
            try:
                answer = self._run(self.command_of(submission), cwd=submission.directory)
            except CommandTimeout as error:
                raise Uncertain(str(error)) from None
            if answer.code == 0:
                submitted = _SUBMITTED.search(answer.out)
                if submitted is None:
                    raise Uncertain(f"sbatch: its answer names no job: {answer.message[:200]!r}")
                return submitted[1]
            if _TIMED_OUT.search(answer.message):
                raise Uncertain(f"sbatch: {answer.message}")
            submitted = _SUBMITTED.search(answer.out)
            if submitted or answer.code < 0 or not answer.message:  # below 0: killed by a signal
                named = f"names job {submitted[1]}" if submitted else "names no job"
                raise Uncertain(f"sbatch: exit code {answer.code}, its answer {named}: {answer.message[:200]!r}")
            if wait is None or not _NOT_REACHED.search(answer.message):
                break
            self._sleep(wait)
        if submission.after is not None and "dependency" in answer.message.lower():
            raise Overtaken(answer.message)
        advice = [advice for pattern, advice in _ADVICE if pattern.search(answer.message)]
        raise Refused("\n".join([answer.message or f"sbatch: exit code {answer.code}", *advice]))

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        """See the protocol: ``squeue``, then ``sacct`` if there is accounting."""
        requested = set(tags)
        answer = self._run(["squeue", "--noheader", "--states=all", "--format=%F|%k", f"--user={os.getuid()}"])
        if answer.code != 0:
            raise UsageError(f"squeue: {answer.message}")
        rows = [line.partition("|") for line in answer.out.splitlines()]
        ids_by_tag = {tag.strip(): job for job, _, tag in rows if tag.strip() in requested}
        if requested - set(ids_by_tag):
            for job, _, tag in (line.partition("|") for line in self._accounting_comments().splitlines()):
                if tag.strip() in requested:
                    ids_by_tag.setdefault(tag.strip(), _row_job(job))
        return ids_by_tag

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        """See the protocol: ``squeue`` for all jobs; ``sacct`` or ``scontrol`` for finished or missing ones."""
        if not job_ids:
            return {}
        listed = ",".join(_job_numbers(job_ids))
        argv = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={listed}", "--format=%i|%T|%P|%r"]
        try:
            answer = self._run(argv)
        except CommandTimeout as error:
            return _all_unknown(job_ids, str(error))
        if (
            answer.code != 0 and "Invalid job id" not in answer.message
        ):  # an unknown id, if it is the only one, is an error
            return _all_unknown(job_ids, f"squeue: {answer.message}")
        statuses = {status.job_id: status for status in _parse_squeue(answer.out)}
        unclear = {job for job, status in statuses.items() if status.state in (ENDED, CANCELLED)}
        arrays = _tasks_by_array(statuses)
        unclear |= {job_id for job_id in job_ids if job_id not in statuses and job_id not in arrays}
        failure = ""
        if unclear:
            ended, failure = self._ended_jobs(_job_numbers(unclear))
            for job, status in ended.items():
                # sacct lags behind: where squeue knows the state, only the exit code is new
                statuses[job] = _with_exit_codes(statuses[job], status) if job in statuses else status
            arrays = _tasks_by_array(statuses)
        return {**statuses, **{job_id: _status_of(statuses, arrays, job_id, failure) for job_id in job_ids}}

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        if not job_ids:
            return {}
        answer = self._run(["scancel", "--verbose", *job_ids])
        failed = dict(re.findall(r"Kill job error on job id (\S+): (.+)", answer.err))
        if answer.code != 0 and not failed:
            return dict.fromkeys(job_ids, answer.message)
        return {job_id: failed.get(job_id, "") for job_id in job_ids}

    @staticmethod
    def is_gone(refusal: str) -> bool:
        """See the protocol. A job that is "already completing" may still write, and is not gone."""
        return "Invalid job id" in refusal

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol. One call for each job: for several, ``scontrol`` does not say which one failed."""
        return {job_id: self._operate(["scontrol", "hold", job_id]) for job_id in job_ids}

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return {job_id: self._operate(["scontrol", "release", job_id]) for job_id in job_ids}

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        """See the protocol: files with Slurm's default names, and with PJM's, which our templates use."""
        patterns = (f"slurm-{job_id}.out", f"slurm-{job_id}_*.out", f"*.{job_id}.out", f"*.{job_id}.err")
        return _existing_files(directory, (*patterns, f"output.{job_id}/*/*/std*"))

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        """See the protocol: ``sacct``, or time and nodes from ``scontrol`` while it still knows the job."""
        answer = self._run(["sacct", "-n", "-P", "-j", job_id, f"--format={','.join(_SACCT_FIELDS)}"])
        if answer.code == 0 and answer.out.strip():
            return _parse_accounting(answer.out, job_id)
        shown = self._run(["scontrol", "-o", "show", "job", job_id])
        if shown.code != 0:
            return None
        times = [_parse_duration(text) for text in re.findall(r"\bRunTime=(\S+)", shown.out)]
        nodes = [int(text) for text in re.findall(r"\bNumNodes=(\d+)", shown.out)]
        if not times or not nodes:
            return None
        return Accounting(elapsed_seconds=float(max(times)), nodes=max(nodes), values={"source": "scontrol"})

    def _operate(self, argv: Sequence[str]) -> str:
        answer = self._run(argv)
        return (
            "" if answer.code == 0 else answer.message.splitlines()[0] if answer.message else f"exit code {answer.code}"
        )

    def _accounting_comments(self) -> str:
        """Return ids and comments of the jobs of the last days; empty if there is no accounting.

        Raises:
            UsageError: there is an accounting, and it does not answer: it may know a job that squeue has forgotten.
        """
        try:
            answer = self._run(["sacct", "-n", "-P", "-X", "--starttime=now-7days", "--format=JobID,Comment"])
        except CommandTimeout:
            raise
        except UsageError:  # no sacct on this machine
            return ""
        if answer.code == 0:
            return answer.out
        if _has_no_accounting(answer):
            return ""
        raise UsageError(f"sacct: {answer.message or f'exit code {answer.code}'}")

    def _ended_jobs(self, jobs: Sequence[str]) -> Tuple[Dict[str, JobStatus], str]:
        """Return the statuses of finished jobs, and the reason if they may be incomplete (otherwise empty)."""
        try:
            answer = self._run(
                ["sacct", "-n", "-P", "-X", "-j", ",".join(jobs), "-o", "JobID,State,ExitCode,Partition"]
            )
            if answer.code == 0:
                statuses = {}
                for line in answer.out.splitlines():
                    row = _SACCT_ROW.match(line.strip())
                    if row:
                        statuses[row["id"]] = _status(row["id"], row["state"], row["group"], "", row["exit"])
                return statuses, ""
            trouble = "" if _has_no_accounting(answer) else f"sacct: {answer.message}"
        except CommandTimeout as error:
            trouble = str(error)
        except UsageError:  # no sacct on this machine: no accounting
            trouble = ""
        try:
            only_job = jobs[0] if len(jobs) == 1 else None  # scontrol takes one id, or shows all
            shown = self._run(["scontrol", "-o", "show", "job", *([only_job] if only_job else [])])
        except CommandTimeout as error:
            return {}, str(error)
        if shown.code != 0 and "Invalid job id" not in shown.message:
            return {}, f"scontrol: {shown.message}"
        return _parse_scontrol(shown.out, set(jobs)), trouble


def _has_no_accounting(answer: CommandResult) -> bool:
    """Whether sacct failed because this Slurm keeps no accounting; any other failure means that it did not answer."""
    return "accounting storage is disabled" in answer.message


def _parse_squeue(text: str) -> Iterable[JobStatus]:
    for line in text.splitlines():
        row = _SQUEUE_ROW.match(line.strip())
        if row:
            yield _status(row["id"], row["state"], row["group"], row["reason"])


def _parse_scontrol(text: str, job_numbers: Iterable[str]) -> Dict[str, JobStatus]:
    """Parse the jobs of ``scontrol -o show job``; for an array, the tasks that have started."""
    statuses = {}
    for line in text.splitlines():
        row = _SCONTROL_ROW.match(line)
        if row is None or (row["array"] or row["job"]) not in job_numbers:
            continue
        if row["array"] and not row["task"].isdecimal():  # "1-2%1": tasks that wait
            continue
        job_id = SlurmScheduler.sub_job_id(row["array"], int(row["task"])) if row["array"] else row["job"]
        statuses[job_id] = _status(job_id, row["state"], row["group"], row["reason"], row["exit"])
    return statuses


def _status(job_id: str, state_name: str, group: str, reason: str, exit_text: str = "") -> JobStatus:
    state = _STATES.get(state_name, UNKNOWN)
    if state == QUEUED and reason in _HOLD_REASONS:
        state = ON_HOLD
    code, number = None, None
    if state in (ENDED, CANCELLED) and exit_text:
        code, number = (int(part) for part in exit_text.split(":"))
    elif state_name == "COMPLETED":
        code = 0
    shown_reason = "" if reason in ("None", "(null)") else reason
    return JobStatus(job_id, state, state_name, code, number or None, None, shown_reason, group)


def _with_exit_codes(queued: JobStatus, accounted: JobStatus) -> JobStatus:
    code = accounted.exit_code if accounted.exit_code is not None else queued.exit_code
    return JobStatus(queued.job_id, queued.state, queued.raw, code, accounted.signal, None, queued.reason, queued.group)


def _status_of(
    statuses: Mapping[str, JobStatus], arrays: Mapping[str, List[JobStatus]], job_id: str, error: str
) -> JobStatus:
    if job_id in statuses:
        return statuses[job_id]
    if job_id in arrays:
        return aggregate_status(job_id, arrays[job_id])
    if error:
        return JobStatus(job_id, UNKNOWN, reason=error)
    return JobStatus(job_id, LOST, reason="Slurm no longer knows the job")


def _tasks_by_array(statuses: Mapping[str, JobStatus]) -> Dict[str, List[JobStatus]]:
    """Group statuses by array: id of an array → status of its tasks, in the order of their numbers."""
    tasks = []
    for text, status in statuses.items():
        job = SlurmScheduler.parse_job_id(text)
        if job.index is not None:
            tasks.append((job.submitted, job.index, status))
    arrays: Dict[str, List[JobStatus]] = {}
    for array, _, status in sorted(tasks, key=lambda task: task[:2]):
        arrays.setdefault(array, []).append(status)
    return arrays


def _row_job(text: str) -> str:
    """Return the job or array of a row of ``sacct``; the waiting tasks of an array share a row: ``92_[1-3]``."""
    match = re.match("[0-9]+", text)
    return match[0] if match is not None else text


def _job_numbers(job_ids: Iterable[str]) -> List[str]:
    """Return the numbers of jobs and arrays, sorted, each once.

    Raises:
        UsageError: an id is not a job id of Slurm.
    """
    return [str(number) for number in sorted({SlurmScheduler.parse_job_id(job_id).number for job_id in job_ids})]


def _all_unknown(job_ids: Sequence[str], reason: str) -> Dict[str, JobStatus]:
    return {job_id: JobStatus(job_id, UNKNOWN, reason=reason) for job_id in job_ids}


def _existing_files(directory: Path, patterns: Iterable[str]) -> List[Path]:
    files: Dict[Path, None] = {}
    for pattern in patterns:
        files.update((path, None) for path in sorted(directory.glob(pattern)))
    return list(files)


def _parse_accounting(text: str, job_id: str) -> Accounting:
    """Combine the job's own line with the values that only the lines of its steps have: energy and memory."""
    lines = [dict(zip(_SACCT_FIELDS, line.split("|"))) for line in text.splitlines() if line.strip()]
    job_line = next((line for line in lines if line["JobID"] == job_id), lines[0])
    steps = [line for line in lines if "." in line["JobID"]]
    energies = [
        float(line["ConsumedEnergyRaw"]) for line in (job_line, *steps) if _is_number(line["ConsumedEnergyRaw"])
    ]
    energy = max(energies, default=0.0) or None
    elapsed = float(job_line["ElapsedRaw"]) if _is_number(job_line["ElapsedRaw"]) else None
    values = {name: value for line in (*steps, job_line) for name, value in line.items() if value and name != "JobID"}
    return Accounting(
        elapsed_seconds=elapsed,
        nodes=int(job_line["AllocNodes"]) if job_line.get("AllocNodes", "").isdecimal() else None,
        energy_joules=energy,
        power_watts=energy / elapsed if energy and elapsed else None,
        values={**values, "source": "sacct"},
    )


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _parse_duration(text: str) -> int:
    """Convert ``1-02:03:04`` to seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
