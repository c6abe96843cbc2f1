"""What a scheduler can do; one file beside this one for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Protocol, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.job import JobStatus


@dataclass(frozen=True)
class JobId:
    """The id of a job or sub-job as its scheduler reads it (:meth:`Scheduler.parse_job_id`).

    Attributes:
        text: the id as the scheduler writes it, such as ``239[1]`` (PJM), ``92_3`` (Slurm) or ``local-7``.
        submitted: id that the scheduler gave at the submission: ``239`` for the sub-job ``239[1]`` of a bulk job. A
            link of a chain was submitted by itself: ``240_1`` for ``240_1``.
        number: number of the job; sub-jobs and the links of a step job share it.
        index: number of a bulk or array job's sub-job, else None.
        step: number of a step job's link (PJM), from 0, else None.
    """

    text: str
    submitted: str
    number: int
    index: Optional[int] = None
    step: Optional[int] = None


@dataclass(frozen=True)
class Submission:
    """One script to hand in.

    Attributes:
        script: file in ``directory``.
        directory: where the job starts: the run directory.
        name: of the job, as the script has it.
        after: id of the job that must have ended with "resume me" (``errors.EXIT_RESUME``) before this link of a chain
            runs; None for a job of its own or the first link.
        link: of the chain, from 1.
        chain: links in all; 1 for a job of its own.
        elapse: time limit in seconds, for a scheduler that does not read it in the script; None for none.
        bulk: sub-jobs, such as ``0-9``; empty for a job of its own.
        tag: free text by which the job is found again (:meth:`Scheduler.find`); empty for none.
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


class Refused(UsageError):
    """The scheduler has not taken the job: there is none."""


class Overtaken(Refused):
    """A link of a chain was not taken because the job that it was to follow has ended already."""


class Uncertain(UsageError):
    """The scheduler may have taken the job: it did not answer, or its answer names no job."""


@dataclass(frozen=True)
class Accounting:
    """What a scheduler has measured of a finished job.

    Attributes:
        elapsed_seconds: of the job.
        nodes: allocated.
        energy_joules: of all its nodes, measured; None where not known or the job was too short to tell.
        power_watts: average of all its nodes; None as above.
        values: everything else that it says, key → text.
    """

    elapsed_seconds: Optional[float] = None
    nodes: Optional[int] = None
    energy_joules: Optional[float] = None
    power_watts: Optional[float] = None
    values: Mapping[str, str] = field(default_factory=dict)


class Scheduler(Protocol):
    """PJM, Slurm or this machine. Every method raises UsageError for a mistake of the user (no such command, refused
    submission with the scheduler's words and advice), and nothing is passed through a shell."""

    name: str

    @staticmethod
    def parse_job_id(text: str) -> JobId:
        """Read the id of a job or sub-job; needs no scheduler at work.

        Raises:
            UsageError: the text is not a job id of this scheduler.
        """

    @staticmethod
    def sub_job_id(job_id: str, index: int) -> str:
        """The id of one sub-job of the bulk job ``job_id``, as its script's exit record has it."""

    def command_of(self, submission: Submission) -> List[str]:
        """The words that :meth:`submit` runs, for ``--dry-run`` and the record."""

    def submit(self, submission: Submission) -> str:
        """Hand in a script; returns the job's id.

        Raises:
            Refused: there is no job.
            Overtaken: as above, since ``submission.after`` has ended already.
            Uncertain: there may be one, under ``submission.tag``.
        """

    def find(self, tags: Sequence[str]) -> Dict[str, str]:
        """Tag → id of the job that carries it, for those that the scheduler knows; one query for all.

        Raises:
            UsageError: the scheduler does not answer.
        """

    def poll(self, job_ids: Sequence[str]) -> Dict[str, JobStatus]:
        """One query for all jobs, finished ones included. A job that the scheduler does not know has the state
        ``lost``; all have ``unknown``, with the reason, where it does not answer. The sub-jobs of a bulk job are there
        under their own ids as well."""

    def cancel(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """Job id → "" where it was accepted, else why not."""

    def hold(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """As :meth:`cancel`."""

    def release(self, job_ids: Sequence[str]) -> Dict[str, str]:
        """As :meth:`cancel`."""

    def output_files(self, directory: Path, job_id: str) -> List[Path]:
        """What the job has printed, the script's own output first; those that exist."""

    def accounting(self, directory: Path, job_id: str) -> Optional[Accounting]:
        """What was measured of a finished job; None where the scheduler keeps nothing."""
