"""The table of all jobs of the simulator, in memory and in the spool."""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Set, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import cut
from fugaku_gpt.pjm.jobids import PjmJobId, expand_job_ids
from fugaku_gpt.simulator.job import BULK, Job, job_from_record, parent_state
from fugaku_gpt.simulator.spool import Spool


class JobTable:
    """All jobs by number and sub-job number; every change is written to the spool at once."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._jobs: Dict[int, Dict[int, Job]] = {}  # number → sub-job number (-1: the job itself) → job
        self._open: Set[int] = set()  # numbers of jobs that have not finished
        for values in spool.read_records():
            try:
                self._add(job_from_record(values))
            except (TypeError, KeyError, ValueError) as error:
                problem = f"has no {error}" if isinstance(error, KeyError) else cut(str(error))
                raise UsageError(f"{spool.jobs}: a record is not a job's of this version: {problem}") from None

    def _add(self, job: Job) -> None:
        self._jobs.setdefault(job.number, {})[-1 if job.sub is None else job.sub] = job
        if not job.is_finished:
            self._open.add(job.number)

    def add(self, job: Job) -> None:
        """Add a job and write its record."""
        self._add(job)
        self.save(job)

    def save(self, job: Job) -> None:
        """Write a job's record."""
        if job.is_finished and job.sub is None:
            self._open.discard(job.number)
        self.spool.write_record(job.id, job.to_record())

    def remove(self, number: int) -> None:
        """Remove a job and its sub-jobs, with their records and folders."""
        self._open.discard(number)
        for job in self._jobs.pop(number, {}).values():
            self.spool.remove_job(job.id)
        # the script, which may be there without a record if a submission was interrupted
        self.spool.remove_job(str(number))

    def __iter__(self) -> Iterator[Job]:
        """Iterate over all jobs in the order of their numbers, parents before their sub-jobs."""
        for number in sorted(self._jobs):
            jobs = self._jobs[number]
            for sub in sorted(jobs):
                yield jobs[sub]

    def unfinished_jobs(self) -> Iterator[Job]:
        """Jobs that have not finished, with all of their sub-jobs."""
        for number in sorted(self._open):
            yield from (self._jobs[number][sub] for sub in sorted(self._jobs[number]))

    def top_level_jobs(self) -> Iterator[Job]:
        """Jobs and parents of sub-jobs, without the sub-jobs."""
        for number in sorted(self._jobs):
            if -1 in self._jobs[number]:
                yield self._jobs[number][-1]

    def get(self, number: int, sub: Optional[int] = None) -> Optional[Job]:
        """The job with a number, or one of its sub-jobs; None if there is none."""
        return self._jobs.get(number, {}).get(-1 if sub is None else sub)

    def parent(self, job: Job) -> Optional[Job]:
        """The bulk or step job to which a sub-job belongs; None for other jobs."""
        return self.get(job.number) if job.sub is not None else None

    def sub_jobs(self, job: Job) -> List[Job]:
        """The sub-jobs of a parent, in the order of their numbers."""
        jobs = self._jobs.get(job.number, {})
        return [jobs[sub] for sub in sorted(jobs) if sub >= 0]

    def execution_units(self, job: Job) -> List[Job]:
        """The jobs that run scripts: the job itself, or the sub-jobs of a parent."""
        return self.sub_jobs(job) if job.parent else [job]

    def count_unfinished(self) -> int:
        """Number of jobs that have not finished, without sub-jobs."""
        return sum(1 for job in self.top_level_jobs() if not job.is_finished)

    def resolve_ids(self, id_text: str) -> Tuple[List[Job], Optional[List[PjmJobId]]]:
        """The existing jobs that an id or a range of ids names, and the ids; None for the ids of a malformed text."""
        try:
            ids = expand_job_ids(id_text)
        except ValueError:
            return [], None
        return [job for job in map(self._find, ids) if job is not None], ids

    def _find(self, job_id: PjmJobId) -> Optional[Job]:
        sub = job_id.bulk if job_id.bulk is not None else job_id.step
        job = self.get(job_id.number, sub)
        if job is None or (sub is not None and (job.request.model == BULK) != (job_id.bulk is not None)):
            return None
        return job

    def refresh_parent(self, job: Job, timestamp: float) -> Optional[Job]:
        """Update the state of a sub-job's parent; return the parent if it has finished by that, else None."""
        parent = self.parent(job)
        if parent is None or parent.is_finished:
            return None
        sub_jobs = self.sub_jobs(parent)
        state = parent_state(sub_jobs)
        if state == parent.state:
            return None
        parent.enter(state, timestamp)
        if parent.is_finished:
            worst = max(sub_jobs, key=lambda sub_job: (sub_job.code != 0, sub_job.exit_code))
            parent.exit_code, parent.code, parent.signal = worst.exit_code, worst.code, worst.signal
        self.save(parent)
        return parent if parent.is_finished else None
