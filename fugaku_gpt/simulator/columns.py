"""Items of ``pjstat``: their columns in tables and their values."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from fugaku_gpt.simulator.job import ALLOCATING, FINAL_STATES, RUNNING, Job
from fugaku_gpt.simulator.stats import date_text, elapse_text, node_text, seconds_text

NAME_WIDTH = 10
USER_WIDTH = 8
REASON_WIDTH = 16


@dataclass(frozen=True)
class Column:
    """One item; its values are functions of a job and the current time in seconds since the epoch.

    Attributes:
        item: name for ``--choose``, ``--filter`` and ``--sort``.
        title: title in tables and in ``--data``.
        width: width in tables, in characters.
        value: value in tables and in ``--data``.
        full_title: title in ``--data`` with ``-s``.
        full: value in ``--data`` with ``-s``, where times carry seconds in parentheses.
        max_characters: characters of the value that tables show; 0: all.
        is_statistics_only: True if the item is shown with ``-s`` only.
    """

    item: str
    title: str
    width: int
    value: Callable[[Job, float], str]
    full_title: str = ""
    full: Optional[Callable[[Job, float], str]] = None
    max_characters: int = 0
    is_statistics_only: bool = False


def format_duration(seconds: Optional[float]) -> str:
    """A number of seconds as ``0001:00:00``; None as ``unlimited``."""
    if seconds is None:
        return "unlimited"
    total_seconds = int(seconds)
    return f"{total_seconds // 3600:04d}:{total_seconds // 60 % 60:02d}:{total_seconds % 60:02d}"


def start_date(job: Job, timestamp: float) -> str:
    """The start as ``MM/DD hh:mm:ss``; a planned one as ``(MM/DD hh:mm)``, with ``@`` if the user set it; or ``-``."""
    started = job.dates.get(RUNNING)
    if started is not None and (job.started or job.parent):
        return time.strftime("%m/%d %H:%M:%S", time.localtime(started))
    if job.state in FINAL_STATES:
        return "-"
    if job.request.at is not None:
        return time.strftime("(%m/%d %H:%M)@", time.localtime(job.request.at))
    if job.is_active:
        return time.strftime("(%m/%d %H:%M)", time.localtime(job.dates.get(ALLOCATING, timestamp)))
    return "-"


def elapse_limit(job: Job, timestamp: float) -> str:
    """The elapse limit, or the range of limits."""
    request = job.request
    maximum = format_duration(request.elapse_max)
    return f"{format_duration(request.elapse_min)}-{maximum}" if request.ranged else maximum


def elapsed_seconds(job: Job, timestamp: float) -> float:
    """Seconds that a job has run; for a parent, seconds since its first sub-job started."""
    if job.parent and RUNNING in job.dates:
        return job.dates.get("exit", timestamp) - job.dates[RUNNING]
    return job.elapsed_seconds(timestamp)


def _rank_map(job: Job) -> str:
    return "bynode" if "rank-map-bynode" in job.request.mpi else "bychip"


def _short_date(seconds: Optional[float]) -> str:
    return "-" if seconds is None else time.strftime("%m/%d %H:%M:%S", time.localtime(seconds))


COLUMNS: Tuple[Column, ...] = (
    Column("jid", "JOB_ID", 10, lambda job, timestamp: job.id, "JOB ID"),
    Column("jnam", "JOB_NAME", 10, lambda job, timestamp: job.request.name, "JOB NAME", max_characters=NAME_WIDTH),
    Column("jmdl", "MD", 2, lambda job, timestamp: job.request.model, "JOB MODEL"),
    Column("st", "ST", 3, lambda job, timestamp: job.state, "STATE"),
    Column("usr", "USER", 8, lambda job, timestamp: job.user, "USER", max_characters=USER_WIDTH),
    Column("grp", "GROUP", 8, lambda job, timestamp: job.group, "GROUP", max_characters=USER_WIDTH),
    Column(
        "sdt",
        "START_DATE",
        15,
        start_date,
        "JOB START DATE",
        lambda job, timestamp: date_text(job.dates.get(RUNNING) if job.started or job.parent else None),
    ),
    Column(
        "elp",
        "ELAPSE_TIM",
        10,
        lambda job, timestamp: format_duration(elapsed_seconds(job, timestamp)),
        "ELAPSE TIME (USE)",
        lambda job, timestamp: seconds_text(elapsed_seconds(job, timestamp)),
    ),
    Column("elpl", "ELAPSE_LIM", 21, elapse_limit, "ELAPSE TIME (LIMIT)", lambda job, timestamp: elapse_text(job)),
    Column(
        "nnumr",
        "NODE_REQUIRE",
        15,
        lambda job, timestamp: job.request.shape(),
        "NODE NUM (REQUIRE)",
        lambda job, timestamp: node_text(job),
    ),
    Column("vnnum", "VNODE", 6, lambda job, timestamp: "-", "VNODE NUM (REQUIRE)"),
    Column("core", "CORE", 4, lambda job, timestamp: "-", "CORE"),
    Column("vmem", "V_MEM", 12, lambda job, timestamp: "-", "VNODE MEMORY SIZE (LIMIT)"),
    Column("vpol", "V_POL", 5, lambda job, timestamp: "-", "V_POL"),
    Column("epol", "E_POL", 5, lambda job, timestamp: "-", "E_POL"),
    Column("rank", "RANK", 9, lambda job, timestamp: _rank_map(job), "RANK"),
    Column("lst", "LST", 3, lambda job, timestamp: job.last_state, "LAST STATE"),
    Column("ec", "EC", 3, lambda job, timestamp: str(job.exit_code), "EXIT CODE"),
    Column("pc", "PC", 3, lambda job, timestamp: str(job.code), "PJM CODE"),
    Column("sn", "SN", 2, lambda job, timestamp: str(job.signal), "SIGNAL NO"),
    Column("pri", "PRI", 3, lambda job, timestamp: str(job.request.priority), "PRIORITY"),
    Column(
        "adt",
        "ACCEPT",
        14,
        lambda job, timestamp: _short_date(job.dates.get("accept")),
        "ACCEPT DATE",
        lambda job, timestamp: date_text(job.dates.get("accept")),
    ),
    Column("rscg", "RSC_GRP", 8, lambda job, timestamp: job.request.rscgrp, "RESOURCE GROUP", max_characters=8),
    Column("ermsg", "REASON", 16, lambda job, timestamp: job.reason, "REASON", max_characters=REASON_WIDTH),
    Column(
        "nnuma",
        "NODE_ALLOC",
        15,
        lambda job, timestamp: job.request.shape() if job.started else "-",
        "NODE NUM (ALLOC)",
        lambda job, timestamp: node_text(job) if job.started else "-",
    ),
    Column("cmt", "COMMENT", 16, lambda job, timestamp: job.request.comment, "COMMENT", is_statistics_only=True),
    Column(
        "edt",
        "END_DATE",
        15,
        lambda job, timestamp: date_text(job.dates.get("RNE")),
        "JOB END DATE",
        is_statistics_only=True,
    ),
    Column(
        "std", "PJSUB_DIR", 16, lambda job, timestamp: job.request.directory, "PJSUB DIRECTORY", is_statistics_only=True
    ),
    Column(
        "appname",
        "APPNAME",
        16,
        lambda job, timestamp: job.request.appname,
        "APPLICATION NAME",
        is_statistics_only=True,
    ),
)
BY_ITEM: Dict[str, Column] = {column.item: column for column in COLUMNS}
DEFAULT = ("jid", "jnam", "jmdl", "st", "usr", "sdt", "elpl", "nnumr", "vnnum", "core", "vmem")
VERBOSE = tuple(column.item for column in COLUMNS if not column.is_statistics_only and column.item != "nnuma")


def columns_of(items: List[str]) -> List[Column]:
    """The columns of these items in the order of ``COLUMNS``: ``pjstat`` ignores the order that was asked for."""
    return [column for column in COLUMNS if column.item in items]
