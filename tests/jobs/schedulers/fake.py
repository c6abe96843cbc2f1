"""Fakes for tests of schedulers: commands that return listed replies, and a scheduler in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Union

from fugaku_gpt.jobs.schedulers.commands import CommandResult
from fugaku_gpt.jobs.schedulers.protocol import Accounting, Submission
from fugaku_gpt.records.job import CANCELLED, LOST, ON_HOLD, QUEUED, JobStatus

Reply = Union[CommandResult, Exception]


class Commands:
    """Stand-in for :func:`run_command` that returns the replies in order and records the calls."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.calls: List[List[str]] = []
        self.slept: List[float] = []

    def __call__(self, argv: Sequence[str], *, cwd: Optional[Path] = None, timeout: float = 60.0) -> CommandResult:
        self.calls.append(list(argv))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def command_result(out: str = "", err: str = "", code: int = 0) -> CommandResult:
    """Return the result of a command."""
    return CommandResult(code, out, err)


class FakeScheduler:
    """A scheduler in memory that reports ``statuses``."""

    name = "pjm"

    def __init__(self, submit: Optional[Callable[[Submission], None]] = None) -> None:
        self.statuses: Dict[str, JobStatus] = {}
        self.tags: Dict[str, str] = {}
        self.submitted: List[Submission] = []
        self.polls: List[List[str]] = []
        self.outputs: List[Path] = []
        self._before_submit = submit

    def command_of(self, submission: Submission) -> List[str]:
        """See the protocol."""
        return ["pjsub", submission.script]

    def submit(self, submission: Submission) -> str:
        """See the protocol."""
        if self._before_submit is not None:
            self._before_submit(submission)
        self.submitted.append(submission)
        job_id = f"{100 + len(self.submitted)}"
        self.tags[submission.tag] = job_id
        self.statuses[job_id] = JobStatus(job_id, QUEUED, "QUE")
        return job_id

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return {tag: self.tags[tag] for tag in tags if tag in self.tags}

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        """See the protocol."""
        self.polls.append(list(job_ids))
        return {job_id: self.statuses.get(job_id, JobStatus(job_id, LOST)) for job_id in job_ids}

    def _set_states(self, job_ids: Sequence[str], state: str, raw: str) -> Dict[str, str]:
        reasons = {}
        for job_id in job_ids:
            reasons[job_id] = "" if job_id in self.statuses else f"Job {job_id} does not exist."
            self.statuses[job_id] = JobStatus(job_id, state, raw)
        return reasons

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return self._set_states(job_ids, CANCELLED, "CCL")

    @staticmethod
    def is_gone(refusal: str) -> bool:
        """See the protocol."""
        return "does not exist" in refusal

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return self._set_states(job_ids, ON_HOLD, "HLD")

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """See the protocol."""
        return self._set_states(job_ids, QUEUED, "QUE")

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        """See the protocol."""
        return [path for path in self.outputs if path.exists()]

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        """See the protocol."""
        return None
