"""The jobs of a run directory: ``job.jsonl``, the history of its jobs, and ``exit/``, how each job's script ended.

``job.jsonl`` is append-only, one JSON object per line, distinguished by ``kind``; ``time`` is seconds since the epoch:

* ``intent``: scheduler, tag (unique; submitted with the job as its comment), link (of a chain, from 1), chain, bulk:
  written before the scheduler is called, so that a job can be identified by its tag if the caller was killed;
* ``submitted``: scheduler, job_id, tag, script (name in the run directory), command (words), link, chain, bulk;
  for a script that is not of a run, both have ``folder``, in which the job starts and leaves its output;
* ``refused``: tag, reason: the scheduler has not accepted it; ``abandoned``: the same, discovered afterwards;
* ``status``: job_id and the fields of :class:`JobStatus`, written when they have changed;
* ``cancelled``, ``held``, ``released``: job_id;
* ``attempt``: number, from 1: the files of earlier jobs are now in
  ``attempts/<run>/<number>/`` beside the run directory.

``exit/<sub-job id>.json`` is written by the job script itself, through a rename, when its command has ended or it got a
signal to stop. A script that was killed leaves none.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import EVENTS, SUB_JOBS, cut
from fugaku_gpt.records.files import append_line
from fugaku_gpt.typed_json import check_times, record_of, value_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
JOB_FILE = "job.jsonl"
EXIT_DIR = "exit"
# exit code of a job of PJM: a link of a chain leaves nothing to do for the links behind it, which it cancels
NOTHING_LEFT = 76

QUEUED = "queued"  # accepted, waiting
ON_HOLD = "held"
RUNNING = "running"  # starting and ending included
SUSPENDED = "suspended"
ENDED = "ended"  # the scheduler is done with it, whether it succeeded or failed
CANCELLED = "cancelled"
REJECTED = "rejected"
LOST = "lost"  # the scheduler does not know it, and it has left no exit record
UNKNOWN = "unknown"  # a state that this program does not recognise, or a scheduler that does not answer
STATES = (QUEUED, ON_HOLD, RUNNING, SUSPENDED, ENDED, CANCELLED, REJECTED, LOST, UNKNOWN)
OVER = (ENDED, CANCELLED, REJECTED, LOST)


@dataclass(frozen=True)
class JobStatus:
    """Status of one job as reported by its scheduler.

    Attributes:
        state: one of ``STATES``.
        raw: the scheduler's own name of the state, such as ``RNE`` or ``COMPLETING``.
        exit_code: exit code of the script; None if unknown.
        signal: signal that ended the script; None if none or unknown.
        code: PJM code; None for other schedulers.
        reason: reason as stated by the scheduler; empty if it states none.
        group: resource group or partition.
    """

    job_id: str
    state: str
    raw: str = ""
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    code: Optional[int] = None
    reason: str = ""
    group: str = ""


@dataclass(frozen=True)
class ExitRecord:
    """How a job's script ended, as recorded by the script itself.

    Attributes:
        job_id: id of the job as the scheduler names it inside the job.
        sub_job: sub-job id of a bulk or step job, such as ``239[1]`` or ``64856_0``; the job id for other jobs.
        exit_code: exit code of the command that the script started.
        signal: name of the signal that asked the script to stop, such as ``TERM``; empty if there was none.
        started, ended: seconds since the epoch.
        host: host on which the script ran.
    """

    job_id: str
    sub_job: str
    exit_code: int
    signal: str
    started: int
    ended: int
    host: str
    version: int = VERSION


@dataclass(frozen=True)
class JobEvent:
    """One line of ``job.jsonl``."""

    kind: str
    time: float
    values: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SubmittedJob:
    """One job of a run directory.

    Attributes:
        job_id: id that the scheduler has assigned; for a bulk job, that of the bulk job itself.
        tag: tag that the job carries as its comment; empty if it has none.
        link: number of the link in the chain, from 1.
        chain: number of links of the chain.
        bulk: numbers of the sub-jobs, such as ``0-9``; empty if it is not a bulk job.
        time: time of submission, seconds since the epoch.
        folder: folder in which the job of a plain script starts; empty for the job of a run, which starts in its run
            directory.
    """

    scheduler: str
    job_id: str
    tag: str
    link: int
    chain: int
    bulk: str
    time: float
    folder: str = ""

    def start_folder(self, directory: Path) -> Path:
        """Return the folder in which the job starts, where ``directory`` has its record."""
        return Path(self.folder) if self.folder else directory


@dataclass(frozen=True)
class Intent:
    """A submission without a recorded outcome: its caller was killed, or is still submitting."""

    scheduler: str
    tag: str
    link: int
    chain: int
    bulk: str
    time: float
    folder: str = ""


_BULK = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class JobHistory:
    """History of the present attempt, from ``job.jsonl``.

    Attributes:
        jobs: submitted jobs, in the order of their links.
        open: submissions without a recorded outcome.
        statuses: job id → the last recorded status.
        cancelled: ids of jobs whose cancellation was requested.
        attempts: number of earlier attempts, which are in ``attempts/<run>/`` beside the run directory.
        refused: reason of the newest refusal after which nothing was submitted; empty if there is none.
    """

    jobs: Tuple[SubmittedJob, ...] = ()
    open: Tuple[Intent, ...] = ()
    statuses: Dict[str, JobStatus] = field(default_factory=dict)
    cancelled: Tuple[str, ...] = ()
    attempts: int = 0
    refused: str = ""


def append_event(directory: Path, kind: str, time: float, **values: Any) -> None:
    """Append an event in one write call, so that lines of several writers do not mix. After a line that a full disk or
    a kill has cut short, it begins a new line."""
    append_line(directory / JOB_FILE, json.dumps({"kind": kind, "time": time, **values}, allow_nan=False))


def append_status(directory: Path, time: float, status: JobStatus) -> None:
    """Append the status of a job."""
    append_event(directory, "status", time, **asdict(status))


def read_events(directory: Path) -> List[JobEvent]:
    """Read the events in order; a line that a kill has cut short is left out.

    Raises:
        UsageError: the file cannot be read.
    """
    path = directory / JOB_FILE
    try:
        text = read_text(path, EVENTS, "replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    events = []
    for line in text.splitlines():
        try:
            values = parse_json(line)
            kind, time = value_of(str, values.pop("kind"), "kind"), value_of(float, values.pop("time"), "time")
            check_times(time=time)
            events.append(JobEvent(kind, float(time), values))
        except (ValueError, KeyError, AttributeError, TypeError):  # cut short by a kill, also amid later lines
            continue
    return events


def read_history(directory: Path) -> JobHistory:
    """Read the history of the present attempt, which is the events after the last ``attempt``.

    Raises:
        UsageError: the file cannot be read.
    """
    return history_of(read_events(directory))


def history_of(events: Iterable[JobEvent]) -> JobHistory:
    """Like :func:`read_history`, from events. An event that lacks a field, because another program has written it, is
    left out."""
    jobs: Dict[str, SubmittedJob] = {}
    intents: Dict[str, Intent] = {}
    statuses: Dict[str, JobStatus] = {}
    cancelled: List[str] = []
    attempts, refused = 0, ""
    for event in events:
        values = event.values
        try:
            if event.kind == "attempt":
                jobs, intents, statuses, cancelled, refused = {}, {}, {}, [], ""
                attempts = int(values["number"])
            elif event.kind == "intent":
                intent = _event_record(Intent, values, event.time)
                intents[intent.tag] = intent
            elif event.kind == "submitted":
                job = _event_record(SubmittedJob, {"tag": "", "link": 1, "chain": 1, "bulk": "", **values}, event.time)
                jobs[job.job_id], refused = job, ""
                intents.pop(job.tag, None)
            elif event.kind in ("refused", "abandoned"):
                intents.pop(str(values["tag"]), None)
                refused = str(values["reason"])
            elif event.kind == "status":
                status = record_of(JobStatus, values)
                statuses[status.job_id] = status
            elif event.kind == "cancelled":
                cancelled.append(str(values["job_id"]))
        except (KeyError, TypeError, ValueError, OverflowError):  # the last: of an infinite number
            continue
    ordered = tuple(sorted(jobs.values(), key=lambda job: job.link))
    return JobHistory(ordered, tuple(intents.values()), statuses, tuple(cancelled), attempts, refused)


def aggregate_status(job_id: str, statuses: Iterable[JobStatus]) -> JobStatus:
    """Combine the statuses of a bulk job's sub-jobs, in the order of their numbers: the bulk job is over when all are,
    and in the worst of their states.

    Exit code, signal and PJM code are the first that are not 0; ``raw`` counts the sub-jobs by their states.
    """
    sub_jobs = list(statuses)
    if not sub_jobs:
        return JobStatus(job_id, LOST, reason="the scheduler names none of its sub-jobs")
    states = [sub_job.state for sub_job in sub_jobs]
    waiting = (QUEUED, ON_HOLD, SUSPENDED)
    if RUNNING in states or (any(s in OVER for s in states) and any(s in waiting for s in states)):
        state = RUNNING
    else:
        worst = (UNKNOWN, *waiting, LOST, REJECTED, CANCELLED, ENDED)
        state = next(candidate for candidate in worst if candidate in states)
    counts: Dict[str, int] = {}
    for sub_job in sub_jobs:
        counts[sub_job.raw or sub_job.state] = counts.get(sub_job.raw or sub_job.state, 0) + 1
    reasons = {sub_job.reason: None for sub_job in sub_jobs if sub_job.reason}
    return JobStatus(
        job_id,
        state,
        raw=next(iter(counts)) if len(sub_jobs) == 1 else " ".join(f"{raw}:{count}" for raw, count in counts.items()),
        exit_code=_worst_number(sub_job.exit_code for sub_job in sub_jobs),
        signal=_worst_number(sub_job.signal for sub_job in sub_jobs),
        code=_worst_number(sub_job.code for sub_job in sub_jobs),
        reason="; ".join(reasons),
        group=next((sub_job.group for sub_job in sub_jobs if sub_job.group), ""),
    )


def bulk_numbers(text: str) -> List[int]:
    """Numbers of a bulk job's sub-jobs: ``0-9`` → 0 to 9; empty if it is not a bulk job.

    Raises:
        UsageError: the text is not of this form.
    """
    if not text:
        return []
    matched = _BULK.fullmatch(text)
    if matched is None or int(matched[2] or matched[1]) < int(matched[1]):
        raise UsageError(f"{cut(text)!r}: not the numbers of a bulk job; valid: two numbers such as 0-9")
    numbers = range(int(matched[1]), int(matched[2] or matched[1]) + 1)
    if len(numbers) > SUB_JOBS.value:
        raise UsageError(f"{text!r}: the numbers of a bulk job of more than {SUB_JOBS}")
    return list(numbers)


def exit_records(directory: Path) -> Dict[str, ExitRecord]:
    """Read the exit records of a run directory: sub-job id → how its script ended.

    Raises:
        UsageError: a record is not of this format.
    """
    records: Dict[str, ExitRecord] = {}
    for path in sorted((directory / EXIT_DIR).glob("*.json")):
        record = _read_exit_record(path)
        if record is not None:  # removed meanwhile
            records[str(record.sub_job)] = record
    return records


def exit_record(directory: Path, sub_job: str) -> Optional[ExitRecord]:
    """Read how the script of one job or sub-job ended; None if it has left no record.

    Raises:
        UsageError: the record is not of this format.
    """
    return _read_exit_record(exit_record_file(directory, sub_job))


def exit_record_file(directory: Path, sub_job: str) -> Path:
    """Return the file into which the script of a job or sub-job records how it ended."""
    return directory / EXIT_DIR / f"{sub_job}.json"


def _read_exit_record(path: Path) -> Optional[ExitRecord]:
    mend = "remove it to have the scheduler's word count"
    return read_versioned_json(path, "an exit record", (VERSION,), _exit_record, mend=mend)


def _event_record(kind: Any, values: Dict[str, Any], time: float) -> Any:
    return record_of(kind, {**values, "time": time})


def _exit_record(values: Mapping[str, Any]) -> ExitRecord:
    record = record_of(ExitRecord, values)
    check_times(started=record.started, ended=record.ended)
    return record


def _worst_number(numbers: Iterable[Optional[int]]) -> Optional[int]:
    reported = [number for number in numbers if number is not None]
    return next((number for number in reported if number != 0), 0) if reported else None
