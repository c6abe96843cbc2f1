"""The jobs of a run directory: ``job.jsonl``, what was done and seen, and ``exit/``, how each job's script ended.

``job.jsonl`` is append-only, one JSON object per line, told apart by ``kind``; ``time`` is seconds since the epoch:

* ``submitted``: scheduler, job_id, script (name in the run directory), command (words), link (of a chain, from 1);
* ``status``: job_id and the fields of :class:`JobStatus`, written when they have changed;
* ``cancelled``, ``held``, ``released``: job_id.

``exit/<sub-job id>.json`` is written by the job script itself, through a rename, when its command has ended or it was
told to stop. A script that was killed leaves none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

from fugaku_gpt.errors import UsageError

VERSION = 1
JOB_FILE = "job.jsonl"
EXIT_DIR = "exit"

QUEUED = "queued"  # accepted, waiting
HELD = "held"
RUNNING = "running"  # starting and ending included
SUSPENDED = "suspended"
ENDED = "ended"  # the scheduler is done with it; whether it went well is another question
CANCELLED = "cancelled"
REJECTED = "rejected"
LOST = "lost"  # the scheduler does not know it, and it has left no exit record
UNKNOWN = "unknown"  # a state that this program does not know, or a scheduler that does not answer
STATES = (QUEUED, HELD, RUNNING, SUSPENDED, ENDED, CANCELLED, REJECTED, LOST, UNKNOWN)
OVER = (ENDED, CANCELLED, REJECTED, LOST)


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of one job.

    Attributes:
        state: one of ``STATES``.
        raw: the scheduler's own word, such as ``RNE`` or ``COMPLETING``.
        exit_code: of the script; None where not known.
        signal: that ended the script; None where none or not known.
        code: PJM code; None elsewhere.
        reason: the scheduler's own words; empty where it says none.
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
    """How a job's script ended, by its own account.

    Attributes:
        job_id: as the scheduler names it inside the job.
        sub_job: of a bulk or step job, such as ``239[1]`` or ``64856_0``; the job id elsewhere.
        exit_code: of the command that the script started.
        signal: name of the signal that told the script to stop, such as ``TERM``; empty where none did.
        started, ended: seconds since the epoch.
        host: where the script ran.
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


def append_event(directory: Path, kind: str, time: float, **values: Any) -> None:
    """Add a line; one write call, so that several writers do not mix."""
    line = json.dumps({"kind": kind, "time": time, **values}, allow_nan=False) + "\n"
    with open(directory / JOB_FILE, "ab", buffering=0) as stream:
        stream.write(line.encode("utf-8"))


def append_status(directory: Path, time: float, status: JobStatus) -> None:
    """Add what a scheduler says of a job."""
    append_event(directory, "status", time, **asdict(status))


def read_events(directory: Path) -> List[JobEvent]:
    """The events in order; a line that a kill has cut short is left out.

    Raises:
        UsageError: the file cannot be read.
    """
    path = directory / JOB_FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    events = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
            events.append(JobEvent(values.pop("kind"), float(values.pop("time")), values))
        except (ValueError, KeyError, AttributeError, TypeError):  # cut short by a kill, also amid later lines
            continue
    return events


def exit_records(directory: Path) -> Dict[str, ExitRecord]:
    """Sub-job id → how its script ended.

    Raises:
        UsageError: a record is not of this format.
    """
    found = {}
    for path in sorted((directory / EXIT_DIR).glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {name: values[name] for name in ExitRecord.__dataclass_fields__}
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{path}: not an exit record; remove it to have the scheduler's word count") from None
        if known["version"] != VERSION:
            raise UsageError(f"{path}: version {known['version']}; this program reads version {VERSION}")
        found[str(known["sub_job"])] = ExitRecord(**known)
    return found
