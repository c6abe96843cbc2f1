"""The folders of this machine's jobs, and the state that they record.

Jobs are folders in the user's state directory, so that every process of the user finds them by id::

    ~/.local/state/fugaku-gpt/local/<number>/
      job.json             the job, written once
      state.json           its state, written by the queue; state-<n>.json for each sub-job of a bulk job
      hold, cancel         empty files: requests of the user

Each file has one writer, and is either complete or absent.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import psutil

from fugaku_gpt.errors import EXIT_RESUME, UsageError
from fugaku_gpt.input_files import read_text, resolved
from fugaku_gpt.jobs.schedulers.protocol import JobId, Submission
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.records.job import ENDED, RUNNING, bulk_numbers
from fugaku_gpt.typed_json import record_of

# variables that a job inherits from the process that submitted it; others would depend on who started the queue
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "HOME", "USER", "LOGNAME", "SHELL")
_ID = re.compile(r"local-([0-9]{1,15})(?:\[([0-9]{1,10})\])?")


@dataclass(frozen=True)
class LocalJob:
    """A job of the queue; fields that are not listed are those of ``protocol.Submission``.

    Attributes:
        host: machine on which it runs; several machines may share a home directory.
        mark: value of an environment variable by which its processes are found.
        environment: environment of its processes.
        submitted: time of submission, seconds since the epoch.
    """

    number: int
    script: str
    directory: str
    after: Optional[str]
    elapse: Optional[float]
    bulk: str
    tag: str
    host: str
    mark: str
    environment: Dict[str, str]
    submitted: float

    @property
    def job_id(self) -> str:
        """The id of the job, such as ``local-7``."""
        return job_id_of(self.number)

    @property
    def subs(self) -> List[str]:
        """The numbers of the sub-jobs; one empty text for a job without sub-jobs."""
        return [str(number) for number in bulk_numbers(self.bulk)] or [""]

    def sub_id(self, sub: str) -> str:
        """Return the id of a sub-job, ``local-7[3]``, or that of the job."""
        return sub_job_id(self.job_id, int(sub)) if sub else self.job_id

    def output(self, sub: str) -> Path:
        """Return the file of the script's output."""
        return Path(self.directory) / f"{self.sub_id(sub)}.out"


class LocalStore:
    """The folders of the jobs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, submission: Submission, host: str) -> LocalJob:
        """Add a job with the next free number."""
        self.root.mkdir(parents=True, exist_ok=True)
        number = max((int(path.name) for path in self.root.iterdir() if path.name.isdecimal()), default=0) + 1
        while True:
            try:
                (self.root / str(number)).mkdir()
                break
            except FileExistsError:  # another process took this number
                number += 1
        job = LocalJob(
            number=number,
            script=submission.script,
            directory=str(resolved(submission.directory)),
            after=submission.after,
            elapse=submission.elapse,
            bulk=submission.bulk,
            tag=submission.tag,
            host=host,
            mark=uuid.uuid4().hex,
            environment={name: os.environ[name] for name in INHERITED if name in os.environ},
            submitted=time.time(),
        )
        write_json_atomically(self.root / str(number) / "job.json", asdict(job))
        return job

    def job(self, number: int) -> Optional[LocalJob]:
        """Return a job; None if it does not exist, or is being created."""
        values = read_json_object(self.root / str(number) / "job.json")
        try:
            return record_of(LocalJob, values) if values is not None else None
        except (TypeError, KeyError, ValueError):
            raise UsageError(f"{self.root / str(number)}: not a job of this version; move this folder away") from None

    def jobs(self) -> List[LocalJob]:
        """Return all jobs, oldest first."""
        numbers = sorted(int(path.name) for path in self.root.glob("*") if path.name.isdecimal())
        return [job for job in map(self.job, numbers) if job is not None]

    def state(self, job: LocalJob, sub: str) -> Optional[Dict[str, Any]]:
        """Return the state of a sub-job that the queue has written; None before it has started."""
        return read_json_object(self._state_file(job, sub))

    def write_state(self, job: LocalJob, sub: str, values: Dict[str, Any]) -> None:
        """Write the state of a sub-job; only the queue does."""
        write_json_atomically(self._state_file(job, sub), values)

    def has_request(self, job: LocalJob, request: str) -> bool:
        """Whether the user has requested ``hold`` or ``cancel`` for this job."""
        return (self.root / str(job.number) / request).exists()

    def set_request(self, job: LocalJob, request: str, present: bool = True) -> None:
        """Set or withdraw a request, see :meth:`has_request`."""
        path = self.root / str(job.number) / request
        if present:
            path.touch()
        elif path.exists():
            path.unlink()

    def _state_file(self, job: LocalJob, sub: str) -> Path:
        return self.root / str(job.number) / (f"state-{sub}.json" if sub else "state.json")


def queue_file(host: str) -> str:
    """Return the name of the file that identifies the queue process of a machine."""
    return f"queue-{host}.json"


def this_process() -> Dict[str, Any]:
    """Identify this process, for :func:`is_alive`."""
    return {"pid": os.getpid(), "created": psutil.Process().create_time()}


def log_prefix(queue: Dict[str, Any], job_id: str) -> str:
    """Return the beginning of the line in which a queue, as :func:`this_process` identified it, says why it ended while
    it ran a job. A queue before it, such as before a reboot, has another."""
    return f"queue {queue.get('pid')} of {queue.get('created')}: {job_id}: "


def is_alive(process: Dict[str, Any]) -> bool:
    """Whether the process that :func:`this_process` identified is running; its pid may have been reused since."""
    try:
        candidate = psutil.Process(int(process["pid"]))
        return (
            abs(candidate.create_time() - float(process["created"])) < 1.0
            and candidate.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def may_run(store: LocalStore, job: LocalJob) -> Tuple[bool, str]:
    """Return whether a waiting job may run now, and, if it can never run, the reason."""
    if store.has_request(job, "hold"):
        return False, ""
    if job.after is None:
        return True, ""
    predecessor = store.job(parse_job_id(job.after).number)
    if predecessor is None:
        return False, f"{job.after}, which it was to follow, is not there"
    state = store.state(predecessor, predecessor.subs[0])
    if state is None:
        return False, f"after {job.after}, which was cancelled" if store.has_request(predecessor, "cancel") else ""
    if state["state"] == RUNNING and is_alive(state):
        return False, ""
    if state["state"] == ENDED and state.get("exit_code") == EXIT_RESUME:
        return True, ""
    return False, f"after {job.after}, which did not ask to be resumed"


def parse_job_id(text: str) -> JobId:
    """Read the id of a job or sub-job of this machine.

    Raises:
        UsageError: the text is not an id of this scheduler.
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise UsageError(f"{text[:60]!r}: not a job of this machine; valid: local-7 or local-7[3]")
    number, index = int(match[1]), int(match[2]) if match[2] is not None else None
    job_id = job_id_of(number)
    return JobId(job_id if index is None else sub_job_id(job_id, index), job_id, number, index=index)


def job_id_of(number: int) -> str:
    """Return the id of a job: ``local-7``."""
    return f"local-{number}"


def sub_job_id(job_id: str, index: int) -> str:
    """Return the id of a bulk job's sub-job: ``local-7[3]``."""
    return f"{job_id}[{index}]"


def read_json_object(path: Path) -> Optional[Dict[str, Any]]:
    try:
        values = parse_json(read_text(path, RECORD))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: not a JSON object")
    return values
