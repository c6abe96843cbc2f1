"""All jobs that the simulator knows, in memory and in the spool."""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Set, Tuple

from fugaku_gpt.pjm.jobids import PjmJobId, expand_job_ids
from fugaku_gpt.simulator.job import BULK, Job, job_from_record, parent_state
from fugaku_gpt.simulator.spool import Spool


class Table:
    """The jobs, by number and sub-job number; every change goes to the spool at once."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._jobs: Dict[int, Dict[int, Job]] = {}  # number, sub-job number (-1: the job itself)
        self._open: Set[int] = set()  # numbers of jobs that are not over
        for values in spool.read_records():
            self._add(job_from_record(values))

    def _add(self, job: Job) -> None:
        self._jobs.setdefault(job.number, {})[-1 if job.sub is None else job.sub] = job
        if not job.over:
            self._open.add(job.number)

    def add(self, job: Job) -> None:
        """Take a job in."""
        self._add(job)
        self.save(job)

    def save(self, job: Job) -> None:
        """Write a job down."""
        if job.over and job.sub is None:
            self._open.discard(job.number)
        self.spool.write_record(job.id, job.to_record())

    def drop(self, number: int) -> None:
        """Forget a job and its sub-jobs."""
        self._open.discard(number)
        for job in self._jobs.pop(number, {}).values():
            self.spool.forget(job.id)
        self.spool.forget(str(number))  # the script, also where a submission was cut short before the job's own record

    def __iter__(self) -> Iterator[Job]:
        """In the order of numbers, parents before their sub-jobs."""
        for number in sorted(self._jobs):
            jobs = self._jobs[number]
            for sub in sorted(jobs):
                yield jobs[sub]

    def open(self) -> Iterator[Job]:
        """Those of jobs that are not over, all of their sub-jobs included."""
        for number in sorted(self._open):
            yield from (self._jobs[number][sub] for sub in sorted(self._jobs[number]))

    def top(self) -> Iterator[Job]:
        """Jobs and parents, without sub-jobs."""
        for number in sorted(self._jobs):
            if -1 in self._jobs[number]:
                yield self._jobs[number][-1]

    def get(self, number: int, sub: Optional[int] = None) -> Optional[Job]:
        """One job."""
        return self._jobs.get(number, {}).get(-1 if sub is None else sub)

    def parent(self, job: Job) -> Optional[Job]:
        """The bulk or step job that a sub-job belongs to."""
        return self.get(job.number) if job.sub is not None else None

    def subs(self, job: Job) -> List[Job]:
        """The sub-jobs of a parent, in order."""
        jobs = self._jobs.get(job.number, {})
        return [jobs[sub] for sub in sorted(jobs) if sub >= 0]

    def running_units(self, job: Job) -> List[Job]:
        """The job itself, or a parent's sub-jobs: what runs."""
        return self.subs(job) if job.parent else [job]

    def unfinished(self) -> int:
        """Jobs that are not over, sub-jobs not counted."""
        return sum(1 for job in self.top() if not job.over)

    def named(self, text: str) -> Tuple[List[Job], Optional[List[PjmJobId]]]:
        """(jobs that an id or range names, its ids): no jobs where there are none, no ids where it is no id."""
        try:
            ids = expand_job_ids(text)
        except ValueError:
            return [], None
        return [job for job in map(self._find, ids) if job is not None], ids

    def _find(self, job_id: PjmJobId) -> Optional[Job]:
        sub = job_id.bulk if job_id.bulk is not None else job_id.step
        job = self.get(job_id.number, sub)
        if job is None or (sub is not None and (job.request.model == BULK) != (job_id.bulk is not None)):
            return None
        return job

    def refresh_parent(self, job: Job, now: float) -> Optional[Job]:
        """Bring the parent of a sub-job up to date; returns it if it has ended by that."""
        parent = self.parent(job)
        if parent is None or parent.over:
            return None
        subs = self.subs(parent)
        state = parent_state(subs)
        if state == parent.state:
            return None
        parent.enter(state, now)
        if parent.over:
            worst = max(subs, key=lambda sub: (sub.code != 0, sub.exit_code))
            parent.exit_code, parent.code, parent.signal = worst.exit_code, worst.code, worst.signal
        self.save(parent)
        return parent if parent.over else None
