"""A scheduler that keeps its jobs in a folder and runs none: it outlives the processes that submit, as real ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from fugaku_gpt.errors import Uncertain
from fugaku_gpt.jobs.schedulers.protocol import Accounting, Refused, Submission
from fugaku_gpt.records.files import append_line
from fugaku_gpt.records.job import LOST, QUEUED, JobStatus


class FakeScheduler:
    """See :class:`fugaku_gpt.jobs.schedulers.protocol.Scheduler`.

    Attributes:
        states: job id → its reported state; queued where there is none.
        refuse: name of a run's folder → the text of a refusal.
        polls: job ids of each poll.
    """

    name = "slurm"

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.states: Dict[str, JobStatus] = {}
        self.refuse: Dict[str, str] = {}
        self.uncertain: List[str] = []
        self.polls: List[List[str]] = []

    def jobs(self) -> List[Dict[str, str]]:
        """All accepted jobs, in order."""
        file = self.root / "jobs"
        return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []

    def command_of(self, submission: Submission) -> List[str]:
        return ["sbatch", submission.script]

    def submit(self, submission: Submission) -> str:
        name = submission.directory.name
        if name in self.refuse:
            raise Refused(self.refuse[name])
        assert (submission.directory / submission.script).exists() and (submission.directory / "sweep.json").exists()
        job_id = str(100 + len(self.jobs()))
        append_line(self.root / "jobs", json.dumps({"id": job_id, "tag": submission.tag, "run": name}))
        if name in self.uncertain:
            raise Uncertain("sbatch: no answer within 60 s")
        return job_id

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        return {job["tag"]: job["id"] for job in self.jobs() if job["tag"] in tags}

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        self.polls.append(list(job_ids))
        accepted = {job["id"] for job in self.jobs()}
        unknown = {job_id: JobStatus(job_id, LOST) for job_id in job_ids if job_id not in accepted}
        return {**{job_id: self.states.get(job_id, JobStatus(job_id, QUEUED)) for job_id in job_ids}, **unknown}

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        return dict.fromkeys(job_ids, "")

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        return dict.fromkeys(job_ids, "")

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        return dict.fromkeys(job_ids, "")

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        return []

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        return None
