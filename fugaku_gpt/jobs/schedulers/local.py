"""This machine as a scheduler: a background process runs a queue of job scripts one after the other.

The queue (``local_queue.py``) starts when a job can run and exits when none can. A job whose queue was killed is lost;
its processes carry its mark and are ended by :meth:`LocalScheduler.cancel` or by the next queue.
"""

from __future__ import annotations

import glob
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import fugaku_gpt
from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.schedulers.local_store import (
    LocalJob,
    LocalStore,
    is_alive,
    log_prefix,
    may_run,
    parse_job_id,
    queue_file,
    read_json_object,
    sub_job_id,
)
from fugaku_gpt.jobs.schedulers.protocol import Accounting, JobId, Refused, Submission
from fugaku_gpt.launch.processes import GRACE_SECONDS, MARK, end_marked_processes, marked_processes
from fugaku_gpt.records.job import CANCELLED, LOST, ON_HOLD, OVER, QUEUED, RUNNING, UNKNOWN, JobStatus, aggregate_status

GROUP = "this machine"
_START_SECONDS = 60.0
_LOG = "queue.log"
_LOG_TAIL_BYTES = 65536
_CANNOT_START = "the queue of this machine cannot be started"
_IS_OVER = "is over"
_NO_SUCH_JOB = "there is no such job"
# the package may be a checkout that is not installed
_IMPORTED_FROM = Path(fugaku_gpt.__file__).resolve().parent.parent


class LocalScheduler:
    """See :class:`fugaku_gpt.jobs.schedulers.protocol.Scheduler`.

    Args:
        root: folder of the queue; default: a folder in the user's home.
    """

    name = "local"
    query_command = ""
    why_no_exclusion = "this machine is the only node of its queue"

    def __init__(self, root: Optional[Path] = None) -> None:
        self.store = LocalStore((root if root is not None else default_root()).absolute())
        self._host = socket.gethostname()

    @staticmethod
    def parse_job_id(text: str) -> JobId:
        """See the protocol: ``local-7``, or the sub-job ``local-7[3]`` of a bulk job."""
        return parse_job_id(text)

    @staticmethod
    def sub_job_id(job_id: str, index: int) -> str:
        """See the protocol."""
        return sub_job_id(job_id, index)

    def command_of(self, submission: Submission) -> List[str]:
        """See the protocol: the command that the queue will run."""
        return ["bash", submission.script]

    def submit(self, submission: Submission) -> str:
        """See the protocol."""
        if not (submission.directory / submission.script).is_file():
            raise Refused(f"{submission.directory / submission.script}: no such job script")
        if submission.after is not None:
            self._find_job(submission.after)
        try:
            job = self.store.add(submission, self._host)
        except OSError as error:
            raise Refused(f"{self.store.root}: cannot be written: {error.strerror}") from None
        try:
            self._start_queue()
        except UsageError as error:  # the job stays in the queue, and the next process that serves it runs it
            raise Uncertain(str(error)) from None
        return job.job_id

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return {job.tag: job.job_id for job in self.store.jobs() if job.tag and job.tag in tags}

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        """See the protocol. Starts the queue again if it has ended while jobs wait."""
        statuses: Dict[str, JobStatus] = {}
        waiting = False
        for job_id in job_ids:
            parsed_id = parse_job_id(job_id)
            job = self.store.job(parsed_id.number)
            if job is None:
                statuses[job_id] = JobStatus(job_id, LOST, reason=f"not in {self.store.root}")
                continue
            sub_statuses = [self._status(job, sub_status) for sub_status in job.subs]
            statuses.update((sub_status.job_id, sub_status) for sub_status in sub_statuses)
            if parsed_id.index is None:
                statuses[job_id] = sub_statuses[0] if job.subs == [""] else aggregate_status(job_id, sub_statuses)
            elif parsed_id.text in statuses:
                statuses[job_id] = statuses[parsed_id.text]
            else:
                statuses[job_id] = JobStatus(job_id, LOST, reason=f"{job.job_id} has the sub-jobs {job.bulk}")
            waiting = waiting or self._awaits_queue(job)
        if waiting and not self._is_queue_running():
            self._start_queue()
        return statuses

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol. Also ends processes that a lost job has left running."""
        refusals = {}
        for job_id in job_ids:
            job = self._find_job(job_id)
            state = self.poll([job.job_id])[job.job_id].state
            refusals[job_id] = _IS_OVER if state in OVER and state != LOST else self._other_host_refusal(job)
            if refusals[job_id]:
                continue
            self.store.set_request(job, "cancel")
            if state == LOST:
                end_marked_processes(job.mark, GRACE_SECONDS)
        return refusals

    @staticmethod
    def is_gone(refusal: str) -> bool:
        """See the protocol."""
        return refusal == _IS_OVER or _NO_SUCH_JOB in refusal

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol; only a waiting job can be held."""
        return {job_id: self._set_hold(job_id, QUEUED, True) for job_id in job_ids}

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        refusals = {job_id: self._set_hold(job_id, ON_HOLD, False) for job_id in job_ids}
        if not all(refusals.values()):
            self._start_queue()
        return refusals

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        """See the protocol."""
        return sorted(directory.glob(f"{glob.escape(job_id)}.out")) + sorted(
            directory.glob(f"{glob.escape(job_id)}[[]*[]].out")
        )

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        """See the protocol: the run time."""
        parsed_id = parse_job_id(job_id)
        job = self.store.job(parsed_id.number)
        if job is None:
            return None
        subs = job.subs if parsed_id.index is None else [str(parsed_id.index)]
        states = [self.store.state(job, sub) for sub in subs]
        seconds = [state["ended"] - state["started"] for state in states if state and state["state"] in OVER]
        return Accounting(elapsed_seconds=sum(seconds), nodes=1, values={"host": job.host}) if seconds else None

    def _status(self, job: LocalJob, sub: str) -> JobStatus:
        job_id = job.sub_id(sub)
        state = self.store.state(job, sub)
        if state is None:
            if self.store.has_request(job, "cancel"):
                return JobStatus(job_id, CANCELLED, "CANCELLED", group=GROUP)
            if self.store.has_request(job, "hold"):
                return JobStatus(job_id, ON_HOLD, "PENDING", reason="held", group=GROUP)
            reason = f"after {job.after}" if job.after is not None and self._is_blocked(job) else ""
            end = self._end_of_queue(job_id, self._last_queue()) if not reason else ""
            reason = f"the queue has ended and is started again: {end}" if end else reason
            return JobStatus(job_id, QUEUED, "PENDING", reason=reason, group=GROUP)
        if state["state"] == RUNNING:
            if job.host != self._host:
                return JobStatus(job_id, UNKNOWN, "RUNNING", reason=f"runs on {job.host}: ask there", group=GROUP)
            if is_alive(state):
                return JobStatus(job_id, RUNNING, "RUNNING", group=GROUP)
            if self.store.state(job, sub) != state:  # meanwhile the job has ended, and as its last so has the queue
                return self._status(job, sub)
            remaining = len(marked_processes(job.mark))
            end = self._end_of_queue(job_id, state)
            reason = f"the queue that ran it has ended: {end}" if end else "the queue that ran it was killed"
            if remaining:
                reason += f"; {remaining} of its processes still run: `fugaku-gpt job cancel` ends them"
            return JobStatus(job_id, LOST, "RUNNING", reason=reason, group=GROUP)
        return JobStatus(
            job_id,
            state["state"],
            state["raw"],
            exit_code=state.get("exit_code"),
            signal=state.get("signal"),
            reason=state.get("reason", ""),
            group=GROUP,
        )

    def _awaits_queue(self, job: LocalJob) -> bool:
        """Whether this job, or one that it follows, waits for nothing but the queue of this machine."""
        if job.host != self._host or self.store.has_request(job, "cancel"):
            return False
        if all(self.store.state(job, sub) is not None for sub in job.subs):
            return False
        is_ready, refusal = may_run(self.store, job)
        if is_ready or refusal:
            return True
        predecessor = self.store.job(parse_job_id(job.after).number) if job.after is not None else None
        return predecessor is not None and self._awaits_queue(predecessor)

    def _is_blocked(self, job: LocalJob) -> bool:
        return job.after is not None and self.poll([job.after])[job.after].state not in OVER

    def _set_hold(self, job_id: str, state: str, hold: bool) -> str:
        job = self._find_job(job_id)
        present = self.poll([job.job_id])[job.job_id].state
        if present != state:
            return f"is {present}"
        refusal = self._other_host_refusal(job)
        if not refusal:
            self.store.set_request(job, "hold", hold)
        return refusal

    def _other_host_refusal(self, job: LocalJob) -> str:
        return "" if job.host == self._host else f"runs on {job.host}: ask there"

    def _find_job(self, job_id: str) -> LocalJob:
        job = self.store.job(parse_job_id(job_id).number)
        if job is None:
            raise UsageError(f"{job_id}: {_NO_SUCH_JOB} in {self.store.root}")
        return job

    def _last_queue(self) -> Optional[Dict[str, Any]]:
        """The last queue of this machine, as ``this_process`` identified it; None if there was none."""
        return read_json_object(self.store.root / queue_file(self._host))

    def _is_queue_running(self) -> bool:
        queue = self._last_queue()
        return queue is not None and is_alive(queue)

    def _start_queue(self) -> None:
        """Start a queue; it exits at once if one is already running."""
        argv = [sys.executable, "-m", "fugaku_gpt.jobs.schedulers.local_queue", str(self.store.root)]
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        try:
            with open(self.store.root / _LOG, "ab") as log:
                completed = subprocess.run(
                    argv,
                    cwd=_IMPORTED_FROM,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.PIPE,
                    timeout=_START_SECONDS,
                    check=False,
                    start_new_session=True,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{_CANNOT_START}: {error}") from None
        if completed.returncode != 0:
            reason = completed.stderr.decode("utf-8", "replace").strip() or f"see {self.store.root / _LOG}"
            raise UsageError(f"{_CANNOT_START}: {reason}")

    def _end_of_queue(self, job_id: str, queue: Optional[Dict[str, Any]]) -> str:
        """The cause that a queue has recorded when it ended while it ran this job; empty if it has recorded none.

        Args:
            queue: the process of the queue, as ``this_process`` identified it.
        """
        if queue is None or is_alive(queue):
            return ""
        prefix = log_prefix(queue, job_id)
        try:
            with open(self.store.root / _LOG, "rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return next((line[len(prefix) :] for line in reversed(lines) if line.startswith(prefix)), "")


def default_root() -> Path:
    """Return the folder of this user's queue."""
    return Path.home() / ".local" / "state" / "fugaku-gpt" / "local"
