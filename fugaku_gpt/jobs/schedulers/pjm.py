"""PJM: ``pjsub``, ``pjstat``, ``pjdel``, ``pjhold``, ``pjrls``.

A chain is a step job: each link is submitted with ``sd=ec==1,2,76:all``, the condition that *cancels* it and all later
links. These are the exit codes of a link that has failed, was refused, or has left nothing to do. A link whose node has
died (PJM code 20) has none of them, so that the next link starts; its script decides whether it continues.

PJM reports the end of a sub-job only when the complete bulk or step job has ended: until then a sub-job that has ended
is in neither of the two lists, and its state is ``unknown``, but its own exit record exists.
"""

from __future__ import annotations

import glob
import re
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import EXIT_RUN_FAILED, EXIT_USAGE, Uncertain, UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandResult, CommandTimeout, RunCommand, run_command
from fugaku_gpt.jobs.schedulers.protocol import Accounting, JobId, Overtaken, Refused, Submission
from fugaku_gpt.pjm import jobids
from fugaku_gpt.pjm.messages import Refusal, first_refusal, operation_results, submitted_ids
from fugaku_gpt.pjm.pjstat import parse_data, status_of, statuses_of
from fugaku_gpt.pjm.stats import read_stats_file
from fugaku_gpt.records.job import LOST, NOTHING_LEFT, OVER, UNKNOWN, JobStatus, aggregate_status

RETRY_SECONDS = (2.0, 4.0, 8.0)
HISTORY_DAYS = 90  # as long as Fugaku keeps finished jobs
_SEARCH_DAYS = 7
_CHAIN_IS_OVER = ",".join(map(str, (EXIT_RUN_FAILED, EXIT_USAGE, NOTHING_LEFT)))  # exit codes of a link
_COLUMNS = "jid,st,ec,pc,sn,ermsg,rscg"
_NO_SUCH_OPTION = ("0001", "0002")
_STEP_JOB_OVER = "0012"
_NO_SUCH_JOB = re.compile(r"\bJob \S+ does not exist\b")
_NOT_ANSWERED = ("0090", "0091")


class PjmScheduler:
    """See :class:`fugaku_gpt.jobs.schedulers.protocol.Scheduler`.

    Args:
        run: runs one command; see :func:`fugaku_gpt.jobs.schedulers.commands.run_command`.
        sleep: called to wait between attempts.
    """

    name = "pjm"
    query_command = "pjstat"
    why_no_exclusion = (
        "pjsub has no option that keeps a job off a node; PJM itself gives no job a node that is down, and of a node "
        "that is up and computes wrongly the site's support has to know"
    )

    def __init__(self, run: RunCommand = run_command, sleep: Callable[[float], None] = time.sleep) -> None:
        self._run = run
        self._sleep = sleep

    @staticmethod
    def parse_job_id(text: str) -> JobId:
        """See the protocol: ``238``, a bulk job's ``239[1]``, a step job's ``240_0``."""
        try:
            pjm = jobids.parse_job_id(text)
        except ValueError as error:
            raise UsageError(str(error)) from None
        submitted = pjm if pjm.bulk is None else pjm.parent
        return JobId(str(pjm), str(submitted), pjm.number, index=pjm.bulk, step=pjm.step)

    @staticmethod
    def sub_job_id(job_id: str, index: int) -> str:
        """See the protocol."""
        return str(jobids.PjmJobId(_job_number(job_id), bulk=index))

    def command_of(self, submission: Submission) -> List[str]:
        """See the protocol; the command runs in the submission's directory."""
        argv = ["pjsub", "-z", "jid"]
        if submission.tag:
            argv += ["--comment", submission.tag]
        if submission.chain > 1:
            step_parameters = [f"sn={submission.link - 1}"]
            if submission.after is not None:
                step_parameters = [
                    f"jid={_step_job(submission.after)}",
                    *step_parameters,
                    f"sd=ec=={_CHAIN_IS_OVER}:all",
                ]
            argv += ["--step", "--sparam", ",".join(step_parameters)]
        return [*argv, submission.script]

    def submit(self, submission: Submission) -> str:
        """See the protocol. A refusal that may be temporary is retried after 2, 4 and 8 seconds."""
        argv = self.command_of(submission)
        pauses = list(RETRY_SECONDS)
        while True:
            try:
                answer = self._run(argv, cwd=submission.directory)
            except CommandTimeout as error:
                raise Uncertain(str(error)) from None
            refusal = first_refusal(f"{answer.err}\n{answer.out}")
            ids = submitted_ids(answer.out) or submitted_ids(answer.err)
            if ids and answer.code == 0:
                return _link_id(ids[-1], submission)
            if ids or (refusal is None and (answer.code <= 0 or not answer.message)):  # below 0: killed by a signal
                named = f"names job {ids[-1]}" if ids else "names no job"
                raise Uncertain(f"pjsub: exit code {answer.code}, its answer {named}: {answer.message[:200]!r}")
            if refusal is not None and refusal.code in _NO_SUCH_OPTION and "-z" in argv:
                argv = [word for word in argv if word not in ("-z", "jid")]  # an old PJM without -z jid
                continue
            if refusal is not None and refusal.code == _STEP_JOB_OVER and submission.after is not None:
                raise Overtaken(_refusal_message(refusal, answer))
            if refusal is None or refusal.remedy != "retry":
                raise Refused(_refusal_message(refusal, answer))
            pause = pauses.pop(0) if pauses else None
            if refusal.code in _NOT_ANSWERED and submission.tag:  # the job may have been accepted nevertheless
                self._sleep(pause or RETRY_SECONDS[-1])
                job_id = self._accepted_in_spite_of(refusal, answer, submission)
                if job_id is not None:
                    return job_id
            elif pause is not None:
                self._sleep(pause)
            if pause is None:
                raise Refused(_refusal_message(refusal, answer))

    def _accepted_in_spite_of(self, refusal: Refusal, answer: CommandResult, submission: Submission) -> Optional[str]:
        """Return the id of a job for which ``pjsub`` reported that PJM has not answered; None if there surely is none.

        Raises:
            Uncertain: ``pjstat`` cannot say either.
        """
        try:
            return self.find([submission.tag]).get(submission.tag)
        except UsageError as error:
            raise Uncertain(f"{_refusal_message(refusal, answer)}\n{error}") from None

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        """See the protocol: by the comments of present jobs, then by those of the last days."""
        ids_by_tag: Dict[str, str] = {}
        for history in ([], ["-H", f"day={_SEARCH_DAYS}"]):
            answer = self._query(["pjstat", *history, "-E", "-s", "--data", "--choose", "jid,cmt"])
            if answer.code != 0:
                raise UsageError(f"pjstat: {_refusal_message(first_refusal(answer.err), answer)}")
            for row in parse_data(answer.out):
                status = status_of(row)
                if status is not None:
                    ids_by_tag.update(
                        (tag, status.job_id) for tag in set(tags) & set(row.values()) if tag not in ids_by_tag
                    )
            if set(ids_by_tag) == set(tags):
                break
        return {tag: self.parse_job_id(job_id).submitted for tag, job_id in ids_by_tag.items()}

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        """See the protocol: one ``pjstat``, and one with ``-H`` for jobs that are not in its answer."""
        if not job_ids:
            return {}
        statuses: Dict[str, JobStatus] = {}
        missing = sorted({_job_number(job_id) for job_id in job_ids})
        for history in ([], ["-H", f"day={HISTORY_DAYS}"]):
            argv = ["pjstat", *history, "-E", "--data", "--choose", _COLUMNS, *map(str, missing)]
            try:
                answer = self._query(argv)
            except CommandTimeout as error:
                return {**_same_status(job_ids, UNKNOWN, str(error)), **statuses}
            if answer.code != 0:
                reason = f"pjstat: {_refusal_message(first_refusal(answer.err), answer)}"
                return {**_same_status(job_ids, UNKNOWN, reason.replace("\n", "; ")), **statuses}
            for job_id, status in statuses_of(parse_data(answer.out)).items():
                statuses.setdefault(job_id, status)
            present = {_job_number(job_id) for job_id in statuses}
            missing = [number for number in missing if number not in present]
            if not missing:
                break
        families = _families(statuses)
        return {**statuses, **{job_id: _status_of(families, job_id) for job_id in job_ids}}

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return self._operate("pjdel", job_ids)

    @staticmethod
    def is_gone(refusal: str) -> bool:
        """See the protocol: message 0112 of ``pjdel``, for jobs that have ended as well. That something else does not
        exist, such as a resource unit or a file, says nothing about the job."""
        return _NO_SUCH_JOB.search(refusal) is not None

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return self._operate("pjhold", job_ids)

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return self._operate("pjrls", job_ids)

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        """See the protocol: the script's ``.out`` and ``.err``, then the output of each rank, in order."""
        name = glob.escape(job_id)
        files: Dict[Path, None] = {}
        for pattern in (f"*.{name}.out", f"*.{name}.err", f"*.{name}[[]*.out", f"*.{name}[[]*.err"):
            files.update((path, None) for path in sorted(directory.glob(pattern)))
        for folder in dict.fromkeys((job_id, str(_job_number(job_id)))):
            ranks = (directory / f"output.{folder}").glob("*/*/std*")
            files.update((path, None) for path in sorted(ranks, key=_rank_key))
        return list(files)

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        """See the protocol: the statistics file, which PJM writes if the job asked for it (``-s``, ``-S``)."""
        for path in sorted(directory.glob(f"*.{glob.escape(job_id)}.stats")):
            jobs = [job for job in read_stats_file(path) if job.job_id == job_id] or read_stats_file(path)[:1]
            if jobs:
                nodes = jobs[0].nodes_allocated
                return Accounting(
                    elapsed_seconds=jobs[0].elapsed_seconds,
                    nodes=nodes.count if nodes is not None else None,
                    energy_joules=jobs[0].measured_joules,
                    power_watts=jobs[0].measured_watts,
                    values={key: text for key, text in jobs[0].values.items() if text is not None},
                )
        return None

    def _query(self, argv: Sequence[str]) -> CommandResult:
        """Run a query, and repeat it after 2, 4 and 8 seconds if PJM fails to answer."""
        for wait in RETRY_SECONDS:
            answer = _checked_answer(self._run(argv))
            refusal = first_refusal(answer.err)
            if answer.code == 0 or (refusal is not None and refusal.remedy == "user"):
                return answer
            self._sleep(wait)
        return _checked_answer(self._run(argv))

    def _operate(self, command: str, job_ids: Sequence[str]) -> Dict[str, str]:
        if not job_ids:
            return {}
        answer = self._run([command, *job_ids])
        results = operation_results(f"{answer.out}\n{answer.err}")
        default = "" if answer.code == 0 else f"{command}: {answer.message or f'exit code {answer.code}'}"
        return {job_id: _operation_result(results, job_id, default) for job_id in job_ids}


def _checked_answer(answer: CommandResult) -> CommandResult:
    """Treat an answer to ``--data`` without a header line as a failure, even if the exit code is 0: no job counts as
    lost because of it. Empty output, or messages alone, are an answer: there is no such job."""
    lines = [line for line in answer.out.splitlines() if line.strip() and not line.startswith("[")]
    if answer.code != 0 or not lines or any(line.startswith("H,") for line in lines):
        return answer
    return CommandResult(1, answer.out, f"its answer is not understood: {lines[0][:80]!r}")


def _job_number(job_id: str) -> int:
    return PjmScheduler.parse_job_id(job_id).number


def _step_job(after: str) -> str:
    """Return the id of the step job that a link belongs to. A dry run has placeholders for ids that do not exist yet;
    these are returned as they are."""
    try:
        return str(_job_number(after))
    except UsageError:
        return after


def _link_id(job_id: str, submission: Submission) -> str:
    """Return the id of a chain's link, even if ``pjsub`` named only the step job."""
    job = PjmScheduler.parse_job_id(job_id)
    if submission.chain == 1 or job.step is not None:
        return job_id
    return str(jobids.PjmJobId(job.number, step=submission.link - 1))


def _refusal_message(refusal: Optional[Refusal], answer: CommandResult) -> str:
    """Return PJM's own message, its meaning, and advice."""
    message = answer.message or f"exit code {answer.code}, and no message"
    if refusal is None:
        return message
    meaning = f"{refusal.meaning}: {refusal.advice}" if refusal.advice else refusal.meaning
    return f"{message}\n{meaning}"


def _families(statuses: Mapping[str, JobStatus]) -> Dict[int, List[Tuple[JobId, JobStatus]]]:
    """Group statuses by job: number of a job → status of it and of its sub-jobs, in the order of their numbers."""
    families: Dict[int, List[Tuple[JobId, JobStatus]]] = {}
    for text, status in statuses.items():
        job = PjmScheduler.parse_job_id(text)
        families.setdefault(job.number, []).append((job, status))
    for family in families.values():
        family.sort(key=lambda member: _sub_number(member[0]))
    return families


def _sub_number(job: JobId) -> int:
    """Return the number of a sub-job; -1 for a job that is not a sub-job."""
    return next((number for number in (job.index, job.step) if number is not None), -1)


def _status_of(families: Mapping[int, List[Tuple[JobId, JobStatus]]], job_id: str) -> JobStatus:
    parsed_id = PjmScheduler.parse_job_id(job_id)
    family = families.get(parsed_id.number, [])
    sub_jobs = [status for job, status in family if _sub_number(job) >= 0]
    if _sub_number(parsed_id) < 0 and sub_jobs:
        return aggregate_status(job_id, sub_jobs)
    for job, status in family:
        if job == parsed_id:
            return status
    if any(status.state not in OVER for _, status in family):
        return JobStatus(job_id, UNKNOWN, reason=f"PJM reports how it ended when all of {parsed_id.number} has ended")
    return JobStatus(job_id, LOST, reason=f"PJM knows no job {job_id} of the last {HISTORY_DAYS} days")


def _operation_result(results: Dict[str, str], job_id: str, default: str) -> str:
    """Return the result of a command for a job; for a bulk or step job, that of its sub-jobs."""
    if job_id in results:
        return results[job_id]
    parsed_id = PjmScheduler.parse_job_id(job_id)
    if _sub_number(parsed_id) >= 0:
        return default
    refusals = [why for other_id, why in results.items() if _job_number(other_id) == parsed_id.number]
    return next((why for why in refusals if why), "") if refusals else default


def _same_status(job_ids: Iterable[str], state: str, reason: str) -> Dict[str, JobStatus]:
    return {job_id: JobStatus(job_id, state, reason=reason) for job_id in job_ids}


def _rank_key(path: Path) -> Tuple[int, str]:
    match = re.search(r"\.(\d+)$", path.name)
    return (int(match[1]) if match else -1, path.name)
