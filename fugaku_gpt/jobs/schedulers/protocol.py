"""The protocol of a scheduler; each scheduler has a module beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.job import JobStatus


@dataclass(frozen=True)
class JobId:
    """The id of a job or sub-job as its scheduler reads it (:meth:`Scheduler.parse_job_id`).

    Attributes:
        text: the id as the scheduler writes it, such as ``239[1]`` (PJM), ``92_3`` (Slurm) or ``local-7``.
        submitted: id that the scheduler assigned at submission: ``239`` for the sub-job ``239[1]`` of a bulk job. A
            link of a chain is submitted by itself: ``240_1`` for ``240_1``.
        number: number of the job; sub-jobs and the links of a step job share it.
        index: number of a bulk or array job's sub-job, otherwise None.
        step: number of a step job's link (PJM), from 0, otherwise None.
    """

    text: str
    submitted: str
    number: int
    index: Optional[int] = None
    step: Optional[int] = None


@dataclass(frozen=True)
class Submission:
    """A script to submit.

    Attributes:
        script: name of a file in ``directory``.
        directory: run directory, in which the job starts.
        name: name of the job, as in the script.
        after: id of the job that must have ended with "resume me" (``errors.EXIT_RESUME``) before this link of a chain
            runs; None for a single job or the first link.
        link: number of the link in the chain, from 1.
        chain: number of links; 1 for a single job.
        elapse: time limit in seconds, for a scheduler that does not read it from the script; None for no limit.
        bulk: numbers of the sub-jobs, such as ``0-9``; empty for a job without sub-jobs.
        tag: text by which the job can be found (:meth:`Scheduler.find`); empty for none.
        excluded_nodes: names of nodes that the job must not get; only where :attr:`Scheduler.why_no_exclusion` is
            empty.
    """

    script: str
    directory: Path
    name: str
    after: Optional[str] = None
    link: int = 1
    chain: int = 1
    elapse: Optional[float] = None
    bulk: str = ""
    tag: str = ""
    excluded_nodes: Tuple[str, ...] = ()


class Refused(UsageError):
    """The scheduler refused the submission: there is no job."""


class Overtaken(Refused):
    """A link of a chain was refused because the job that it should follow has already ended."""


@dataclass(frozen=True)
class Accounting:
    """Measurements that a scheduler keeps of a finished job.

    Attributes:
        elapsed_seconds: run time of the job.
        nodes: number of allocated nodes.
        energy_joules: measured energy of all its nodes; None if unknown, or if the job was too short.
        power_watts: average power of all its nodes; None as above.
        values: all other values, key → text.
    """

    elapsed_seconds: Optional[float] = None
    nodes: Optional[int] = None
    energy_joules: Optional[float] = None
    power_watts: Optional[float] = None
    values: Mapping[str, str] = field(default_factory=dict)


class Scheduler(Protocol):
    """A scheduler: PJM, Slurm or this machine.

    Every method raises UsageError for a user's mistake (a missing command, or a refused submission with the scheduler's
    message and advice), and nothing is passed through a shell.

    Attributes:
        query_command: command that is there where the scheduler is; empty for one that is on every machine.
        why_no_exclusion: why a job cannot be kept off nodes, and what to do instead; empty if it can.
    """

    name: str
    query_command: str
    why_no_exclusion: str

    @staticmethod
    def parse_job_id(text: str) -> JobId:
        """Parse the id of a job or sub-job; needs no running scheduler.

        Raises:
            UsageError: the text is not a job id of this scheduler.
        """

    @staticmethod
    def sub_job_id(job_id: str, index: int) -> str:
        """Return the id of one sub-job of the bulk job ``job_id``, as in the exit record of its script."""

    def command_of(self, submission: Submission) -> List[str]:
        """Return the command line that :meth:`submit` runs, for ``--dry-run`` and the record."""

    def submit(self, submission: Submission) -> str:
        """Submit a script; return the job's id.

        Raises:
            Refused: there is no job.
            Overtaken: there is no job because ``submission.after`` has already ended.
            Uncertain: there may be a job with the tag ``submission.tag``.
        """

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        """Return tag → id of the job that carries it, for jobs that the scheduler knows, with one query for all.

        Raises:
            UsageError: the scheduler does not answer.
        """

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        """Return job id → status, with one query for all jobs, including finished ones.

        A job that the scheduler does not know has the state ``lost``; all jobs have the state ``unknown``, with the
        reason, if it does not answer. The sub-jobs of a bulk job are included under their own ids.
        """

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """Cancel jobs; return job id → "" if accepted, otherwise the reason (see :meth:`is_gone`)."""

    @staticmethod
    def is_gone(refusal: str) -> bool:
        """Whether a refusal of :meth:`cancel` says that the job does not exist or has ended, so that nothing runs."""

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """Hold waiting jobs; the result is that of :meth:`cancel`."""

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """Release held jobs; the result is that of :meth:`cancel`."""

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        """Return the job's output files that exist, the script's own output first."""

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        """Return the measurements of a finished job; None if the scheduler keeps none."""
