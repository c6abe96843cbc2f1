"""One job of the simulator: its request and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.pjm.jobids import PjmJobId
from fugaku_gpt.typed_json import record_of

NORMAL, STEP, BULK = "NM", "ST", "BU"

# states
ACCEPTED, QUEUED, ALLOCATING, PROLOGUE, RUNNING = "ACC", "QUE", "RNA", "RNP", "RUN"
EPILOGUE, ENDING, ENDED, CANCELLED, REJECTED, HOLD, ERROR = "RNE", "RNO", "EXT", "CCL", "RJT", "HLD", "ERR"
WAITING_STATES = (ACCEPTED, QUEUED, HOLD, ERROR)
ACTIVE_STATES = (ALLOCATING, PROLOGUE, RUNNING, EPILOGUE, ENDING)
FINAL_STATES = (ENDED, CANCELLED, REJECTED)

# PJM codes; 0 means that the job ended by itself
CODE_DELETED, CODE_HOLD, CODE_DEPENDENCY, CODE_ELAPSE = 1, 4, 6, 11
CODE_DIRECTORY, CODE_PREEMPTED, CODE_NODE_DOWN, CODE_SHELL = 16, 18, 20, 21
ELAPSE_SIGNAL = 24  # SIGXCPU, which PJM shows for a job that ended at its elapse limit


@dataclass(frozen=True)
class JobRequest:
    """The request of one ``pjsub``, with the site's defaults filled in. Records store the fields under these names.

    Attributes:
        name: name of the job; in file names a ``J`` precedes a leading digit.
        model: ``NM`` (normal), ``ST`` (step) or ``BU`` (bulk).
        directory: working directory of ``pjsub``.
        script: path of the copy of the script that was made at submission.
        interpreter: command and arguments that precede the script's path.
        dims: number of nodes along each axis.
        allocation: ``noncont``, ``mesh`` or ``torus``.
        elapse_min, elapse_max: limits of the run time in seconds; None if unlimited.
        ranged: True if the job gave a range of run times.
        resources: values of ``-L`` by key, as the job gave them.
        custom: custom resources, including power knobs with their defaults.
        given: names of options and resources that the job gave; the others are marked ``<DEFAULT>``.
        environment: variables that come from ``-x`` and ``-X``.
        origin: HOME, LANG, ... of the submitting shell, for ``PJM_O_*``.
        bulk: first and last bulk number.
        condition, deletion, steps: parts of the step dependency ``sd=``.
    """

    name: str
    model: str
    directory: str
    script: str
    interpreter: Tuple[str, ...]
    dims: Tuple[int, ...]
    allocation: str
    elapse_min: Optional[int]
    elapse_max: Optional[int]
    ranged: bool
    group: str
    rscgrp: str
    rscunit: str
    resources: Dict[str, Optional[str]]
    custom: Dict[str, str]
    mpi: Dict[str, Optional[str]]
    llio: Dict[str, Optional[str]]
    given: Tuple[str, ...]
    environment: Dict[str, str]
    origin: Dict[str, str]
    processes: int
    processes_per_node: int
    out: str = ""
    err: str = ""
    join: bool = False
    stats: str = ""  # "", "s" or "S"
    stats_path: str = ""
    priority: int = 127
    at: Optional[float] = None
    restart: bool = False
    comment: str = ""
    appname: str = ""
    fs: str = ""
    mail: str = ""
    mail_list: str = ""
    net_route: str = ""
    umask: int = 0o022
    bulk: Tuple[int, int] = (0, 0)
    condition: str = ""
    deletion: str = ""
    steps: Tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """Total number of nodes."""
        count = 1
        for size in self.dims:
            count *= size
        return count

    @property
    def file_name(self) -> str:
        """The name as file names have it."""
        return (("J" + self.name) if self.name[:1].isdecimal() else self.name)[:63]

    def shape(self) -> str:
        """The nodes and their shape, such as ``16:4x4``; with one axis ``16``."""
        return f"{self.nodes}:{'x'.join(map(str, self.dims))}" if len(self.dims) > 1 else str(self.nodes)


@dataclass
class Job:
    """One job, a sub-job of a bulk or step job, or the parent of sub-jobs. Records store the fields under these names.

    Attributes:
        number: number of the job; sub-jobs share it.
        sub: bulk or step number of a sub-job, else None.
        parent: True if the job has sub-jobs and runs nothing itself.
        state, last_state: states as ``pjstat`` shows them.
        dates: state → time of entering it last, in seconds since the epoch; also for ``accept`` and ``exit``.
        exit_code, signal: exit code of the script, and the signal that ended it; 0 if none did.
        code, reason: PJM code and reason of the end.
        mark: value of an environment variable that identifies the job's processes.
        pid: process id of the script; 0 before it is started.
        stopping: PJM code of the reason for which the job is being stopped; None if it is not.
        stop_asked: time at which SIGTERM was sent, in seconds since the epoch.
        killed: True once SIGKILL was sent.
        delete_asked: time at which ``pjdel`` was accepted, in seconds since the epoch.
        hold_after: not used; records have it.
        holds, retries: number of holds, and of further starts.
        started: True once the script was started.
        memory: bytes of memory of the largest process.
        cpu_user, cpu_system: seconds of processor time.
    """

    number: int
    request: JobRequest
    user: str
    group: str
    host: str
    sub: Optional[int] = None
    parent: bool = False
    state: str = ACCEPTED
    last_state: str = "-"
    dates: Dict[str, float] = field(default_factory=dict)
    exit_code: int = 0
    signal: int = 0
    code: int = 0
    reason: str = "-"
    mark: str = ""
    pid: int = 0
    stopping: Optional[int] = None
    stop_asked: Optional[float] = None
    killed: bool = False
    delete_asked: Optional[float] = None
    hold_after: bool = False
    holds: int = 0
    retries: int = 0
    started: bool = False
    memory: int = 0
    cpu_user: float = 0.0
    cpu_system: float = 0.0

    @property
    def id(self) -> str:
        """``238``, ``239[1]`` or ``240_0``."""
        if self.request.model == BULK:
            return str(PjmJobId(self.number, bulk=self.sub))
        return str(PjmJobId(self.number, step=self.sub))

    @property
    def is_finished(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES

    def elapsed_seconds(self, timestamp: float) -> float:
        """Seconds that the script has run, up to ``timestamp`` at most."""
        start_timestamp = self.dates.get(RUNNING)
        if start_timestamp is None or not self.started:
            return 0.0
        return max(0.0, self.dates.get(EPILOGUE, timestamp) - start_timestamp)

    def enter(self, state: str, timestamp: float) -> None:
        """Enter a state at ``timestamp``, in seconds since the epoch."""
        self.last_state, self.state = self.state, state
        self.dates[state] = timestamp
        if state in FINAL_STATES:
            self.dates["exit"] = timestamp

    def to_record(self) -> Dict[str, Any]:
        """The job as JSON values."""
        return {**vars(self), "request": vars(self.request)}  # asdict would copy every value


def job_from_record(values: Dict[str, Any]) -> Job:
    """The inverse of :meth:`Job.to_record`.

    Raises:
        TypeError, KeyError, ValueError: the record is of another version, or damaged.
    """
    job = record_of(Job, values)
    if len(job.request.bulk) != 2 or not job.request.dims or min(job.request.dims) < 1 or job.number < 0:
        raise ValueError("its numbers of nodes or of sub-jobs are wrong")
    return job


def parent_state(jobs: List[Job]) -> str:
    """The state of a bulk or step job, derived from the states of its sub-jobs."""
    states = [job.state for job in jobs]
    for state in (RUNNING, PROLOGUE, EPILOGUE, ALLOCATING, ENDING):
        if state in states:
            return state
    waiting = [state for state in states if state in WAITING_STATES]
    if waiting:
        for state in (QUEUED, ACCEPTED, ERROR):
            if state in waiting:
                return state
        return HOLD
    return CANCELLED if states and all(state == CANCELLED for state in states) else ENDED
