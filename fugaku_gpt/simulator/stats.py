"""The statistics file (``-s``, ``-S``): keys, order and form of Fugaku's, with the simulator's values.

What this machine cannot know is ``-``. The power and energy rows come from a crude model, and the file says so in
``SUPPLEMENTARY INFORMATION``: see :func:`power_rows`.
"""

from __future__ import annotations

import sys
import time
from typing import Dict, List, Optional, Tuple

from fugaku_gpt.config.schema import POWER_KNOBS
from fugaku_gpt.machine.fugaku import CORES
from fugaku_gpt.pjm.values import parse_size
from fugaku_gpt.simulator.environment import file_path, output_paths, stats_path
from fugaku_gpt.simulator.job import OVER, PROLOGUE, QUEUED, RUNNING, Job
from fugaku_gpt.simulator.settings import Settings

Row = Tuple[str, str]
NONE = "-"
MARK = " <DEFAULT>"
WIDTH = 25  # of a key; longer ones push their colon out
NOTE = "SIMULATED: power and energy rows are a crude model, no measurement"
_LIMITS = (
    ("PROC CPU LIMIT", "proc-cpu", "unlimited"),
    ("PROC COREFILE LIMIT", "proc-core", "0.0 MB (0)"),
    ("PROC CREATE PROCESS LIMIT", "proc-crproc", "4096"),
    ("PROC DATA LIMIT", "proc-data", "unlimited"),
    ("PROC LOCKED MEMORY LIMIT", "proc-lockm", "unlimited"),
    ("PROC MESSAGE QUEUE LIMIT", "proc-msgq", "unlimited"),
    ("PROC OPEN FILES LIMIT", "proc-openfd", "1024"),
    ("PROC PENDING SIGNAL LIMIT", "proc-psig", "unlimited"),
    ("PROC PERMFILE LIMIT", "proc-filesz", "unlimited"),
    ("PROC STACK LIMIT", "proc-stack", "unlimited"),
    ("PROC VIRTUAL MEMORY LIMIT", "proc-vmem", "unlimited"),
)
_PARTS = (  # component, watts of a node at 2.0 GHz without eco mode when busy
    ("CORES/CMG", 60.0),
    ("L2CACHE/CMG", 12.0),
    ("MEM/CMG", 28.0),
    ("TOFU", 12.0),
    ("CPU PERIPHERALS", 8.0),
    ("OPTICAL MODULE", 3.0),
    ("PCI-E", 1.0),
)
_MEMORY_GROUPS = 4  # core-memory groups of a node
_OTHER_KNOBS = {"retention_state_acores": "0", "knob_io": "SYSTEM"}


def seconds_text(seconds: float) -> str:
    """`` 1 00:00:00 (86400)`` without the leading space: days only where there are any."""
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d} ({whole})"
    return f"{days} {clock}" if days else clock


def date_text(seconds: Optional[float]) -> str:
    """``2024/02/14 20:55:17``."""
    return NONE if seconds is None else time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(seconds))


def elapse_text(job: Job) -> str:
    """The limit, a range as two."""
    request = job.request
    high = "unlimited" if request.elapse_max is None else seconds_text(request.elapse_max)
    return f"{seconds_text(request.elapse_min)} - {high}" if request.ranged and request.elapse_min else high


def node_text(job: Job) -> str:
    """``16:4x4:noncont``."""
    request = job.request
    return f"{request.shape()}:{request.allocation}"


def rows(job: Job, settings: Settings, state: str) -> List[Row]:
    """The rows of a job (or parent) that ends in ``state``."""
    request = job.request
    ran = job.started or (job.parent and RUNNING in job.dates)
    out, err = output_paths(job)
    end = job.dates.get("exit")
    given = request.given

    def default(value: str, key: str) -> str:
        return value if key in given else value + MARK

    def used(value: str) -> str:
        return value if ran else NONE

    bulk = job.parent and request.model == "BU"
    found: List[Row] = [
        ("JOB ID", job.id),
        ("SUB JOB NUM", str(request.bulk[1] - request.bulk[0] + 1) if bulk else NONE),
        ("START BULKNO", str(request.bulk[0]) if bulk else NONE),
        ("END BULKNO", str(request.bulk[1]) if bulk else NONE),
        ("HOST NAME", job.host),
        ("JOB NAME", request.name),
        ("JOB TYPE", "BATCH"),
        ("JOB MODEL", request.model),
        ("USER", job.user),
        ("GROUP", job.group),
        ("RESOURCE UNIT", request.rscunit),
        ("RESOURCE GROUP", request.rscgrp),
        ("APRIORITY", f"127{MARK}"),
        ("PRIORITY", default(str(request.priority), "priority")),
        ("SHELL", request.interpreter[0]),
        ("MAIL SEND FLAG", "----"),
        ("MAIL ADDRESS", request.mail_list or job.user),
        ("STEP DEPENDENCY EXP", request.condition),
        ("FILE MASK", f"{request.umask:04o}"),
        ("STANDARD OUT FILE", out),
        ("STANDARD ERR FILE", out if request.join else err),
        ("INFORMATION FILE", stats_path(job)),
        ("PJSUB DIRECTORY", request.directory),
        ("FILE SYSTEM NAME", request.fs),
        ("APPLICATION NAME", request.appname),
        ("NUMA POLICY", "0"),
        ("SPECIFIED JOB START DATE", date_text(request.at)),
        ("AUTO RESTART", "yes" if request.restart else "no"),
        ("MPI PROC (REQUIRE)", str(request.processes)),
        ("MPI PROC (ALLOC)", used(str(request.processes))),
        ("MPI STATIC PROC (REQUIRE)", str(request.processes)),
        ("MPI STATIC PROC (ALLOC)", used(str(request.processes))),
        *((title, default(request.resources.get(key) or value, key)) for title, key, value in _LIMITS),
        ("COMMENT", request.comment),
        ("SUPPLEMENTARY INFORMATION", NOTE),
        ("RETRY NUM", str(job.retries)),
        ("LAST STATE", job.state if state in OVER else job.last_state),
        ("STATE", state),
        ("BACKFILL", NONE),
        ("ACCEPT DATE", date_text(job.dates.get("accept"))),
        ("QUEUED DATE", date_text(job.dates.get(QUEUED))),
        ("PRO START DATE", date_text(job.dates.get(PROLOGUE))),
        ("PRO END DATE", used(date_text(job.dates.get(RUNNING)))),
        ("JOB START DATE", used(date_text(job.dates.get(RUNNING)))),
        ("JOB END DATE", used(date_text(job.dates.get("RNE", end)))),
        ("EPI START DATE", used(date_text(job.dates.get("RNE")))),
        ("EPI END DATE", used(date_text(job.dates.get("RNO")))),
        ("EXIT DATE", date_text(end)),
        ("JOB DELETE DATE (REQUIRE)", date_text(job.delete_asked)),
        ("JOB DELETE DATE", used(date_text(job.delete_asked))),
        ("HOLD NUM", str(job.holds)),
        ("EXIT CODE", used(str(job.exit_code))),
        ("SIGNAL NO", used(str(job.signal))),
        ("PJM CODE", str(job.code)),
        ("REASON", job.reason),
        ("ELAPSE TIME (LIMIT)", default(elapse_text(job), "elapse")),
        ("ELAPSE TIME (USE)", used(seconds_text(job.elapsed(end or time.time())))),
        ("USER CPU TIME (USE)", used(f"{job.cpu_user * 1000:.0f} ms")),
        ("SYSTEM CPU TIME (USE)", used(f"{job.cpu_system * 1000:.0f} ms")),
        ("CPU TIME (TOTAL)", used(f"{(job.cpu_user + job.cpu_system) * 1000:.0f} ms")),
        ("MEMORY SIZE (LIMIT)", default(request.resources.get("node-mem") or "unlimited", "node-mem")),
        ("MEMORY SIZE (ALLOC)", NONE),
        ("MAX MEMORY SIZE (USE)", used(f"{job.memory / 2**20:.1f} MiB ({job.memory})")),
        ("CPU NUM (REQUIRE)", f"{CORES * request.nodes}{MARK}"),
        ("CPU NUM (ALLOC)", used(str(CORES * request.nodes))),
        ("CPU NUM (USE)", used(str(CORES * request.nodes))),
        *power_rows(job, settings),
        *_llio_rows(job),
        ("POWER CAPPING DATE", NONE),
        ("NODE NUM (REQUIRE)", node_text(job)),
        ("NODE NUM (ALLOC)", used(node_text(job))),
        ("NODE NUM (USE)", used(str(request.nodes))),
        ("NODE NUM (UNUSED)", used("0")),
        *_knob_rows(job, ran),
    ]
    return found


def power_rows(job: Job, settings: Settings) -> List[Row]:
    """Average power and energy, summed over the job's nodes.

    The model: a busy A64FX node at 2.0 GHz draws what ``_PARTS`` says, whatever it computes; the cores' share scales
    with the square of the clock, with 0.6 in eco mode and 0.9 where retention lets idle cores sleep. MEASURED is
    IDEAL plus a tenth. Numbers of a plausible size for trying programs that read them; no measurement of anything.
    As on the real machine there are none for a job that ran for less than the sampling time.
    """
    seconds = job.elapsed(job.dates.get("exit") or time.time())
    known = job.started and seconds >= settings.sampling
    custom = job.request.custom
    scale = (int(custom["freq"]) / 2000) ** 2
    scale *= 0.6 if custom["eco_state"] != "0" else 1.0
    scale *= 0.9 if custom["retention_state"] == "1" else 1.0
    found: List[Row] = []
    total = 0.0
    for part, watts in _PARTS:
        power = watts * (scale if part.startswith("CORES") else 1.0) * job.request.nodes
        total += power
        if known and part.endswith("/CMG"):  # a row for each of the four only where there is something to tell
            for group in range(_MEMORY_GROUPS):
                found.extend(_power_pairs(f"{part}({group}) (IDEAL)", power / _MEMORY_GROUPS, seconds))
        else:
            found.extend(_power_pairs(f"{part} (IDEAL)", power if known else None, seconds))
    found.extend(_power_pairs("NODE (IDEAL)", total if known else None, seconds))
    found.extend(_power_pairs("NODE (MEASURED)", 1.1 * total if known else None, seconds))
    found.append(("UTILIZATION INFO OF POWER API", NONE))
    found.append(("POWER CONSUMPTION STATE", NONE))
    start = job.dates.get(RUNNING) if known else None
    found.append(("POWER CONSUMPTION MEASURE START DATE", date_text(start)))
    found.append(("POWER CONSUMPTION MEASURE END DATE", date_text(job.dates.get("RNE") if known else None)))
    return found


def _power_pairs(part: str, watts: Optional[float], seconds: float) -> List[Row]:
    """W and Wh, six decimals."""
    energy = None if watts is None else watts * seconds / 3600
    return [
        (f"AVG POWER CONSUMPTION OF {part}", NONE if watts is None else f"{watts:.6f}"),
        (f"ENERGY CONSUMPTION OF {part}", NONE if energy is None else f"{energy:.6f}"),
    ]


def _llio_rows(job: Job) -> List[Row]:
    llio = job.request.llio

    def size(key: str, default: int) -> str:
        text = llio.get(key)
        return str(parse_size(text)) if text else f"{default}{MARK}"

    def switch(key: str, default: int) -> str:
        text = llio.get(key)
        return str(int(text == "on")) if text else f"{default}{MARK}"

    return [
        ("LLIO SHAREDTMP SIZE (REQUIRE)", size("sharedtmp-size", 0)),
        ("LLIO LOCALTMP SIZE (REQUIRE)", size("localtmp-size", 0)),
        ("LLIO AUTO READAHEAD", switch("auto-readahead", 1)),
        ("LLIO ASYNC CLOSE", switch("async-close", 0)),
        ("LLIO CN CACHED WRITE SIZE", size("cn-cached-write-size", 64 * 2**20)),
        ("LLIO CN CACHE SIZE", size("cn-cache-size", 128 * 2**20)),
        ("LLIO CN READ CACHE", switch("cn-read-cache", 1)),
        ("LLIO SIO READ CACHE", switch("sio-read-cache", 1)),
        ("LLIO STRIPE COUNT", llio.get("stripe-count") or f"24{MARK}"),
        ("LLIO STRIPE SIZE", size("stripe-size", 2 * 2**20)),
        (
            "LLIO UNCOMPLETED FILEINFO PATH",
            file_path(job, llio["uncompleted-fileinfo-path"] or "")
            if "uncompleted-fileinfo-path" in llio
            else output_paths(job)[1] + MARK,
        ),
    ]


def _knob_rows(job: Job, ran: bool) -> List[Row]:
    """(REQUIRE), (ALLOC) and (USE) of each knob, and the limits of its values."""
    found: List[Row] = []
    resources = job.request.resources
    knobs = sorted(POWER_KNOBS, key=lambda knob: knob.statistics_place)

    def triple(name: str, value: str, given: bool) -> None:
        found.append((f"{name} (REQUIRE)", value if given else value + MARK))
        found.append((f"{name} (ALLOC)", value if ran else ""))
        # knobs are granted as by a real PJM; this machine's cores run as they always do
        found.append((f"{name} (USE)", value if ran and name == "jobenv" else ""))

    for knob in knobs:
        triple(knob.resource, job.request.custom[knob.resource], knob.resource in resources)
    for name, value in _OTHER_KNOBS.items():
        triple(name, value, False)
    for knob in knobs:
        triple(f"{knob.resource}_min", str(min(knob.values)), False)
        triple(f"{knob.resource}_max", str(max(knob.values)), False)
    triple("jobenv", job.request.custom.get("jobenv", "linux2"), "jobenv" in resources)
    return found


def node_rows(job: Job, node: int) -> List[Row]:
    """What ``-S`` adds for each node."""
    request = job.request
    first = node * request.processes_per_node
    ranks = range(first, min(first + request.processes_per_node, request.processes))
    x, y = request.dims[0], request.dims[1] if len(request.dims) > 1 else 1
    place = (node % x, node // x % y, node // (x * y))
    return [
        ("VNODE ID", NONE),
        ("NODE ID", f"0x{0x01000000 + node:08X}"),
        ("TOFU COORDINATE", f"({','.join(map(str, place[: len(request.dims)]))})"),
        ("RANK NO", " ".join(map(str, ranks)) or NONE),
        *((f"PERF COUNT {number}", NONE) for number in range(1, 10)),
    ]


def format_rows(found: List[Row]) -> str:
    """`` KEY : value`` lines."""
    return "".join(f" {key:<{WIDTH}} : {value}\n" for key, value in found)


def format_stats(job: Job, settings: Settings, state: str) -> str:
    """The whole file."""
    text = "Job Statistical Information\n\n" + format_rows(rows(job, settings, state)) + "\n"
    if job.request.stats == "S" and job.started:
        text += "-" * 80 + "\nNode Statistical Information\n\n"
        text += "\n".join(format_rows(node_rows(job, node)) for node in range(job.request.nodes)) + "\n"
    return text


def write_stats(job: Job, settings: Settings, state: str = "") -> None:
    """Write the file where one is asked for; that it cannot be written ends no job, and is told in the daemon's log."""
    if not job.request.stats:
        return
    path = stats_path(job)
    try:
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(format_stats(job, settings, state or job.state))
    except OSError as error:
        print(f"job {job.id}: {path}: {error.strerror}", file=sys.stderr, flush=True)


def statistics(job: Job, settings: Settings) -> Dict[str, str]:
    """The rows by key, for ``pjstat -s``."""
    return dict(rows(job, settings, job.state))
