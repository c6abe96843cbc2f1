"""What the simulator knows of one job: what was asked for, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.pjm.jobids import PjmJobId

NORMAL, STEP, BULK = "NM", "ST", "BU"

# states
ACCEPTED, QUEUED, ALLOCATING, PROLOGUE, RUNNING = "ACC", "QUE", "RNA", "RNP", "RUN"
EPILOGUE, ENDING, ENDED, CANCELLED, REJECTED, HELD, ERROR = "RNE", "RNO", "EXT", "CCL", "RJT", "HLD", "ERR"
WAITING = (ACCEPTED, QUEUED, HELD, ERROR)
ACTIVE = (ALLOCATING, PROLOGUE, RUNNING, EPILOGUE, ENDING)
OVER = (ENDED, CANCELLED, REJECTED)

# PJM codes; 0 is a job that ended by itself
CODE_DELETED, CODE_HELD, CODE_DEPENDENCY, CODE_ELAPSE = 1, 4, 6, 11
CODE_DIRECTORY, CODE_PREEMPTED, CODE_NODE_DOWN, CODE_SHELL = 16, 18, 20, 21
ELAPSE_SIGNAL = 24  # SIGXCPU: what PJM shows for a job that its elapse limit has ended


@dataclass(frozen=True)
class Request:
    """What ``pjsub`` was asked for, with the site's defaults filled in.

    Attributes:
        name: of the job; file names carry it with a ``J`` before a leading digit.
        model: ``NM``, ``ST`` or ``BU``.
        directory: where ``pjsub`` was started.
        script: where the copy lies that was taken at submission.
        interpreter: words before the script's path.
        dims: nodes along each axis.
        allocation: ``noncont``, ``mesh`` or ``torus``.
        elapse_min, elapse_max: seconds; None where unlimited.
        ranged: a range of times was given.
        resources: ``-L`` as given, by key.
        custom: those of them that are not pjsub's own keys, and the power knobs with their defaults.
        given: names of what was given rather than defaulted, for ``<DEFAULT>`` marks.
        environment: of the job, as far as it comes from ``-x`` and ``-X``.
        origin: the submitting shell's HOME, LANG, ... for ``PJM_O_*``.
        bulk: first and last bulk number.
        condition, deletion, steps: of ``sd=``.
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
        """Nodes in all."""
        count = 1
        for size in self.dims:
            count *= size
        return count

    @property
    def file_name(self) -> str:
        """The name's form in file names."""
        return (("J" + self.name) if self.name[:1].isdigit() else self.name)[:63]

    def shape(self) -> str:
        """Such as ``16:4x4``; one axis: ``16``."""
        return f"{self.nodes}:{'x'.join(map(str, self.dims))}" if len(self.dims) > 1 else str(self.nodes)


@dataclass
class Job:
    """One job, or a sub-job of a bulk or step job, or the parent of such.

    Attributes:
        number: of the job; sub-jobs share it.
        sub: bulk or step number of a sub-job, else None.
        parent: has sub-jobs, and runs nothing itself.
        state, last_state: as ``pjstat`` shows them.
        dates: state → seconds since the epoch of entering it last; ``accept`` and ``exit`` as well.
        mark: finds the job's processes.
        pid: of the script; 0 before it is started.
        stopping: why the job is being ended: PJM code; None while it is not.
        stop_asked, killed: when SIGTERM was sent (seconds since the epoch), and whether SIGKILL was.
        delete_asked: ``pjdel`` was accepted: seconds since the epoch.
        hold_after: becomes held once it has stopped (``pjhold`` of a running job).
        waits_for: reason of the hold, for ``pjstat``.
    """

    number: int
    request: Request
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
    memory: int = 0  # bytes: the largest seen
    cpu_user: float = 0.0
    cpu_system: float = 0.0

    @property
    def id(self) -> str:
        """``238``, ``239[1]`` or ``240_0``."""
        if self.request.model == BULK:
            return str(PjmJobId(self.number, bulk=self.sub))
        return str(PjmJobId(self.number, step=self.sub))

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    def elapsed(self, now: float) -> float:
        """Seconds that the script has run."""
        start = self.dates.get(RUNNING)
        if start is None or not self.started:
            return 0.0
        return max(0.0, self.dates.get(EPILOGUE, now) - start)

    def enter(self, state: str, now: float) -> None:
        """Change the state."""
        self.last_state, self.state = self.state, state
        self.dates[state] = now
        if state in OVER:
            self.dates["exit"] = now

    def to_record(self) -> Dict[str, Any]:
        """As JSON values."""
        return {**vars(self), "request": vars(self.request)}  # asdict would copy everything first


def job_from_record(values: Dict[str, Any]) -> Job:
    """The inverse of :meth:`Job.to_record`.

    Raises:
        TypeError, KeyError: the record is of another version.
    """
    request = dict(values["request"])
    for name in ("interpreter", "dims", "given", "bulk", "steps"):
        request[name] = tuple(request[name])
    return Job(**{**values, "request": Request(**request)})


def parent_state(jobs: List[Job]) -> str:
    """The state of a bulk or step job, by those of its sub-jobs."""
    states = [job.state for job in jobs]
    for state in (RUNNING, PROLOGUE, EPILOGUE, ALLOCATING, ENDING):
        if state in states:
            return state
    waiting = [state for state in states if state in WAITING]
    if waiting:
        for state in (QUEUED, ACCEPTED, ERROR):
            if state in waiting:
                return state
        return HELD
    return CANCELLED if states and all(state == CANCELLED for state in states) else ENDED
