"""The items of ``pjstat``: their columns in the tables, and their values."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from fugaku_gpt.simulator.job import ALLOCATING, OVER, RUNNING, Job
from fugaku_gpt.simulator.stats import date_text, elapse_text, node_text, seconds_text

NAME_SHOWN = 10
USER_SHOWN = 8
REASON_SHOWN = 16


@dataclass(frozen=True)
class Column:
    """One item.

    Attributes:
        item: its name for ``--choose``, ``--filter`` and ``--sort``.
        title: in tables and in ``--data``.
        width: in tables.
        value: for tables and ``--data``.
        full: title and value with ``-s``, where times carry seconds in parentheses.
        cut: characters that tables show.
        extra: only with ``-s``.
    """

    item: str
    title: str
    width: int
    value: Callable[[Job, float], str]
    full_title: str = ""
    full: Optional[Callable[[Job, float], str]] = None
    cut: int = 0
    extra: bool = False


def clock(seconds: Optional[float]) -> str:
    """``0001:00:00``."""
    if seconds is None:
        return "unlimited"
    whole = int(seconds)
    return f"{whole // 3600:04d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def start_date(job: Job, now: float) -> str:
    """``MM/DD hh:mm:ss``; planned: ``(MM/DD hh:mm)``, with an ``@`` where the user has set it; else ``-``."""
    started = job.dates.get(RUNNING)
    if started is not None and (job.started or job.parent):
        return time.strftime("%m/%d %H:%M:%S", time.localtime(started))
    if job.state in OVER:
        return "-"
    if job.request.at is not None:
        return time.strftime("(%m/%d %H:%M)@", time.localtime(job.request.at))
    if job.active:
        return time.strftime("(%m/%d %H:%M)", time.localtime(job.dates.get(ALLOCATING, now)))
    return "-"


def limit(job: Job, now: float) -> str:
    request = job.request
    high = clock(request.elapse_max)
    return f"{clock(request.elapse_min)}-{high}" if request.ranged else high


def elapsed(job: Job, now: float) -> float:
    """Seconds; of a parent since its first sub-job ran."""
    if job.parent and RUNNING in job.dates:
        return job.dates.get("exit", now) - job.dates[RUNNING]
    return job.elapsed(now)


def _rank(job: Job) -> str:
    return "bynode" if "rank-map-bynode" in job.request.mpi else "bychip"


def _short_date(seconds: Optional[float]) -> str:
    return "-" if seconds is None else time.strftime("%m/%d %H:%M:%S", time.localtime(seconds))


COLUMNS: Tuple[Column, ...] = (
    Column("jid", "JOB_ID", 10, lambda job, now: job.id, "JOB ID"),
    Column("jnam", "JOB_NAME", 10, lambda job, now: job.request.name, "JOB NAME", cut=NAME_SHOWN),
    Column("jmdl", "MD", 2, lambda job, now: job.request.model, "JOB MODEL"),
    Column("st", "ST", 3, lambda job, now: job.state, "STATE"),
    Column("usr", "USER", 8, lambda job, now: job.user, "USER", cut=USER_SHOWN),
    Column("grp", "GROUP", 8, lambda job, now: job.group, "GROUP", cut=USER_SHOWN),
    Column(
        "sdt",
        "START_DATE",
        15,
        start_date,
        "JOB START DATE",
        lambda job, now: date_text(job.dates.get(RUNNING) if job.started or job.parent else None),
    ),
    Column(
        "elp",
        "ELAPSE_TIM",
        10,
        lambda job, now: clock(elapsed(job, now)),
        "ELAPSE TIME (USE)",
        lambda job, now: seconds_text(elapsed(job, now)),
    ),
    Column("elpl", "ELAPSE_LIM", 21, limit, "ELAPSE TIME (LIMIT)", lambda job, now: elapse_text(job)),
    Column(
        "nnumr",
        "NODE_REQUIRE",
        15,
        lambda job, now: job.request.shape(),
        "NODE NUM (REQUIRE)",
        lambda job, now: node_text(job),
    ),
    Column("vnnum", "VNODE", 6, lambda job, now: "-", "VNODE NUM (REQUIRE)"),
    Column("core", "CORE", 4, lambda job, now: "-", "CORE"),
    Column("vmem", "V_MEM", 12, lambda job, now: "-", "VNODE MEMORY SIZE (LIMIT)"),
    Column("vpol", "V_POL", 5, lambda job, now: "-", "V_POL"),
    Column("epol", "E_POL", 5, lambda job, now: "-", "E_POL"),
    Column("rank", "RANK", 9, lambda job, now: _rank(job), "RANK"),
    Column("lst", "LST", 3, lambda job, now: job.last_state, "LAST STATE"),
    Column("ec", "EC", 3, lambda job, now: str(job.exit_code), "EXIT CODE"),
    Column("pc", "PC", 3, lambda job, now: str(job.code), "PJM CODE"),
    Column("sn", "SN", 2, lambda job, now: str(job.signal), "SIGNAL NO"),
    Column("pri", "PRI", 3, lambda job, now: str(job.request.priority), "PRIORITY"),
    Column(
        "adt",
        "ACCEPT",
        14,
        lambda job, now: _short_date(job.dates.get("accept")),
        "ACCEPT DATE",
        lambda job, now: date_text(job.dates.get("accept")),
    ),
    Column("rscg", "RSC_GRP", 8, lambda job, now: job.request.rscgrp, "RESOURCE GROUP", cut=8),
    Column("ermsg", "REASON", 16, lambda job, now: job.reason, "REASON", cut=REASON_SHOWN),
    Column(
        "nnuma",
        "NODE_ALLOC",
        15,
        lambda job, now: job.request.shape() if job.started else "-",
        "NODE NUM (ALLOC)",
        lambda job, now: node_text(job) if job.started else "-",
    ),
    Column("cmt", "COMMENT", 16, lambda job, now: job.request.comment, "COMMENT", extra=True),
    Column("edt", "END_DATE", 15, lambda job, now: date_text(job.dates.get("RNE")), "JOB END DATE", extra=True),
    Column("std", "PJSUB_DIR", 16, lambda job, now: job.request.directory, "PJSUB DIRECTORY", extra=True),
    Column("appname", "APPNAME", 16, lambda job, now: job.request.appname, "APPLICATION NAME", extra=True),
)
BY_ITEM: Dict[str, Column] = {column.item: column for column in COLUMNS}
DEFAULT = ("jid", "jnam", "jmdl", "st", "usr", "sdt", "elpl", "nnumr", "vnnum", "core", "vmem")
VERBOSE = tuple(column.item for column in COLUMNS if not column.extra and column.item != "nnuma")


def chosen(items: List[str]) -> List[Column]:
    """The columns of these items, in the table's own order, as ``pjstat`` gives them whatever order was asked for."""
    return [column for column in COLUMNS if column.item in items]
