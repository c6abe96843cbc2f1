"""The statistics file (``-s``, ``-S``): keys, order and form of Fugaku's file, with the simulator's values.

Values that this machine cannot know are ``-``. The power and energy rows come from a crude model, as the file says in
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
from fugaku_gpt.simulator.job import FINAL_STATES, PROLOGUE, QUEUED, RUNNING, Job
from fugaku_gpt.simulator.settings import Settings

StatisticsRow = Tuple[str, str]
UNKNOWN = "-"
DEFAULT_MARK = " <DEFAULT>"
KEY_WIDTH = 25  # characters of a key; a longer key shifts its colon
MODEL_NOTE = "SIMULATED: power and energy rows are a crude model, no measurement"
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
_COMPONENT_WATTS = (  # component, watts of a busy node at 2.0 GHz without eco mode
    ("CORES/CMG", 60.0),
    ("L2CACHE/CMG", 12.0),
    ("MEM/CMG", 28.0),
    ("TOFU", 12.0),
    ("CPU PERIPHERALS", 8.0),
    ("OPTICAL MODULE", 3.0),
    ("PCI-E", 1.0),
)
_MEMORY_GROUPS = 4  # number of core-memory groups of a node
_UNSETTABLE_KNOBS = {"retention_state_acores": "0", "knob_io": "SYSTEM"}


def seconds_text(seconds: float) -> str:
    """A number of seconds as ``00:01:00 (60)``, or with days as ``1 00:00:00 (86400)``."""
    total_seconds = int(seconds)
    days, day_seconds = divmod(total_seconds, 86400)
    clock = f"{day_seconds // 3600:02d}:{day_seconds // 60 % 60:02d}:{day_seconds % 60:02d} ({total_seconds})"
    return f"{days} {clock}" if days else clock


def date_text(seconds: Optional[float]) -> str:
    """A time as ``2024/02/14 20:55:17``; None as ``-``."""
    return UNKNOWN if seconds is None else time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(seconds))


def elapse_text(job: Job) -> str:
    """The elapse limit; a range as its two limits."""
    request = job.request
    maximum = "unlimited" if request.elapse_max is None else seconds_text(request.elapse_max)
    return f"{seconds_text(request.elapse_min)} - {maximum}" if request.ranged and request.elapse_min else maximum


def node_text(job: Job) -> str:
    """The nodes, their shape and their allocation, such as ``16:4x4:noncont``."""
    request = job.request
    return f"{request.shape()}:{request.allocation}"


def job_rows(job: Job, settings: Settings, state: str) -> List[StatisticsRow]:
    """The rows of a job, or of a parent, as of its entering ``state``."""
    request = job.request
    has_run = job.started or (job.parent and RUNNING in job.dates)
    out, err = output_paths(job)
    end = job.dates.get("exit")
    given = request.given

    def marked_default(value: str, key: str) -> str:
        return value if key in given else value + DEFAULT_MARK

    def if_run(value: str) -> str:
        return value if has_run else UNKNOWN

    bulk = job.parent and request.model == "BU"
    rows: List[StatisticsRow] = [
        ("JOB ID", job.id),
        ("SUB JOB NUM", str(request.bulk[1] - request.bulk[0] + 1) if bulk else UNKNOWN),
        ("START BULKNO", str(request.bulk[0]) if bulk else UNKNOWN),
        ("END BULKNO", str(request.bulk[1]) if bulk else UNKNOWN),
        ("HOST NAME", job.host),
        ("JOB NAME", request.name),
        ("JOB TYPE", "BATCH"),
        ("JOB MODEL", request.model),
        ("USER", job.user),
        ("GROUP", job.group),
        ("RESOURCE UNIT", request.rscunit),
        ("RESOURCE GROUP", request.rscgrp),
        ("APRIORITY", f"127{DEFAULT_MARK}"),
        ("PRIORITY", marked_default(str(request.priority), "priority")),
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
        ("MPI PROC (ALLOC)", if_run(str(request.processes))),
        ("MPI STATIC PROC (REQUIRE)", str(request.processes)),
        ("MPI STATIC PROC (ALLOC)", if_run(str(request.processes))),
        *(
            (key, marked_default(request.resources.get(option_key) or value, option_key))
            for key, option_key, value in _LIMITS
        ),
        ("COMMENT", request.comment),
        ("SUPPLEMENTARY INFORMATION", MODEL_NOTE),
        ("RETRY NUM", str(job.retries)),
        ("LAST STATE", job.state if state in FINAL_STATES else job.last_state),
        ("STATE", state),
        ("BACKFILL", UNKNOWN),
        ("ACCEPT DATE", date_text(job.dates.get("accept"))),
        ("QUEUED DATE", date_text(job.dates.get(QUEUED))),
        ("PRO START DATE", date_text(job.dates.get(PROLOGUE))),
        ("PRO END DATE", if_run(date_text(job.dates.get(RUNNING)))),
        ("JOB START DATE", if_run(date_text(job.dates.get(RUNNING)))),
        ("JOB END DATE", if_run(date_text(job.dates.get("RNE", end)))),
        ("EPI START DATE", if_run(date_text(job.dates.get("RNE")))),
        ("EPI END DATE", if_run(date_text(job.dates.get("RNO")))),
        ("EXIT DATE", date_text(end)),
        ("JOB DELETE DATE (REQUIRE)", date_text(job.delete_asked)),
        ("JOB DELETE DATE", if_run(date_text(job.delete_asked))),
        ("HOLD NUM", str(job.holds)),
        ("EXIT CODE", if_run(str(job.exit_code))),
        ("SIGNAL NO", if_run(str(job.signal))),
        ("PJM CODE", str(job.code)),
        ("REASON", job.reason),
        ("ELAPSE TIME (LIMIT)", marked_default(elapse_text(job), "elapse")),
        ("ELAPSE TIME (USE)", if_run(seconds_text(job.elapsed_seconds(end or time.time())))),
        ("USER CPU TIME (USE)", if_run(f"{job.cpu_user * 1000:.0f} ms")),
        ("SYSTEM CPU TIME (USE)", if_run(f"{job.cpu_system * 1000:.0f} ms")),
        ("CPU TIME (TOTAL)", if_run(f"{(job.cpu_user + job.cpu_system) * 1000:.0f} ms")),
        ("MEMORY SIZE (LIMIT)", marked_default(request.resources.get("node-mem") or "unlimited", "node-mem")),
        ("MEMORY SIZE (ALLOC)", UNKNOWN),
        ("MAX MEMORY SIZE (USE)", if_run(f"{job.memory / 2**20:.1f} MiB ({job.memory})")),
        ("CPU NUM (REQUIRE)", f"{CORES * request.nodes}{DEFAULT_MARK}"),
        ("CPU NUM (ALLOC)", if_run(str(CORES * request.nodes))),
        ("CPU NUM (USE)", if_run(str(CORES * request.nodes))),
        *power_rows(job, settings),
        *_llio_rows(job),
        ("POWER CAPPING DATE", UNKNOWN),
        ("NODE NUM (REQUIRE)", node_text(job)),
        ("NODE NUM (ALLOC)", if_run(node_text(job))),
        ("NODE NUM (USE)", if_run(str(request.nodes))),
        ("NODE NUM (UNUSED)", if_run("0")),
        *_knob_rows(job, has_run),
    ]
    return rows


def power_rows(job: Job, settings: Settings) -> List[StatisticsRow]:
    """Average power and energy, summed over the job's nodes.

    The model: a busy A64FX node at 2.0 GHz draws the watts of ``_COMPONENT_WATTS``, whatever it computes; those of the
    cores scale with the square of the clock, with 0.6 in eco mode, and with 0.9 where retention lets idle cores sleep.
    MEASURED is IDEAL plus a tenth. The numbers have a plausible size, to try programs that read them; nothing is
    measured. As on the real machine there are none for a job that ran for less than the sampling time.
    """
    seconds = job.elapsed_seconds(job.dates.get("exit") or time.time())
    is_sampled = job.started and seconds >= settings.sampling
    custom = job.request.custom
    scale = (int(custom["freq"]) / 2000) ** 2
    scale *= 0.6 if custom["eco_state"] != "0" else 1.0
    scale *= 0.9 if custom["retention_state"] == "1" else 1.0
    rows: List[StatisticsRow] = []
    total = 0.0
    for component, watts in _COMPONENT_WATTS:
        power = watts * (scale if component.startswith("CORES") else 1.0) * job.request.nodes
        total += power
        if is_sampled and component.endswith("/CMG"):  # a row for each group only if there is a value
            for group in range(_MEMORY_GROUPS):
                rows.extend(_power_pairs(f"{component}({group}) (IDEAL)", power / _MEMORY_GROUPS, seconds))
        else:
            rows.extend(_power_pairs(f"{component} (IDEAL)", power if is_sampled else None, seconds))
    rows.extend(_power_pairs("NODE (IDEAL)", total if is_sampled else None, seconds))
    rows.extend(_power_pairs("NODE (MEASURED)", 1.1 * total if is_sampled else None, seconds))
    rows.append(("UTILIZATION INFO OF POWER API", UNKNOWN))
    rows.append(("POWER CONSUMPTION STATE", UNKNOWN))
    start = job.dates.get(RUNNING) if is_sampled else None
    rows.append(("POWER CONSUMPTION MEASURE START DATE", date_text(start)))
    rows.append(("POWER CONSUMPTION MEASURE END DATE", date_text(job.dates.get("RNE") if is_sampled else None)))
    return rows


def _power_pairs(component: str, watts: Optional[float], seconds: float) -> List[StatisticsRow]:
    """Rows of average power in W and energy in Wh, with six decimals."""
    energy = None if watts is None else watts * seconds / 3600
    return [
        (f"AVG POWER CONSUMPTION OF {component}", UNKNOWN if watts is None else f"{watts:.6f}"),
        (f"ENERGY CONSUMPTION OF {component}", UNKNOWN if energy is None else f"{energy:.6f}"),
    ]


def _llio_rows(job: Job) -> List[StatisticsRow]:
    llio = job.request.llio

    def size(key: str, default_value: int) -> str:
        text = llio.get(key)
        return str(parse_size(text)) if text else f"{default_value}{DEFAULT_MARK}"

    def switch(key: str, default_value: int) -> str:
        text = llio.get(key)
        return str(int(text == "on")) if text else f"{default_value}{DEFAULT_MARK}"

    return [
        ("LLIO SHAREDTMP SIZE (REQUIRE)", size("sharedtmp-size", 0)),
        ("LLIO LOCALTMP SIZE (REQUIRE)", size("localtmp-size", 0)),
        ("LLIO AUTO READAHEAD", switch("auto-readahead", 1)),
        ("LLIO ASYNC CLOSE", switch("async-close", 0)),
        ("LLIO CN CACHED WRITE SIZE", size("cn-cached-write-size", 64 * 2**20)),
        ("LLIO CN CACHE SIZE", size("cn-cache-size", 128 * 2**20)),
        ("LLIO CN READ CACHE", switch("cn-read-cache", 1)),
        ("LLIO SIO READ CACHE", switch("sio-read-cache", 1)),
        ("LLIO STRIPE COUNT", llio.get("stripe-count") or f"24{DEFAULT_MARK}"),
        ("LLIO STRIPE SIZE", size("stripe-size", 2 * 2**20)),
        (
            "LLIO UNCOMPLETED FILEINFO PATH",
            file_path(job, llio["uncompleted-fileinfo-path"] or "")
            if "uncompleted-fileinfo-path" in llio
            else output_paths(job)[1] + DEFAULT_MARK,
        ),
    ]


def _knob_rows(job: Job, has_run: bool) -> List[StatisticsRow]:
    """Rows (REQUIRE), (ALLOC) and (USE) of each knob and of the limits of its values."""
    rows: List[StatisticsRow] = []
    resources = job.request.resources
    knobs = sorted(POWER_KNOBS, key=lambda knob: knob.statistics_order)

    def add_rows(name: str, value: str, given: bool) -> None:
        rows.append((f"{name} (REQUIRE)", value if given else value + DEFAULT_MARK))
        rows.append((f"{name} (ALLOC)", value if has_run else ""))
        # knobs are granted as by a real PJM, but have no effect on this machine's cores
        rows.append((f"{name} (USE)", value if has_run and name == "jobenv" else ""))

    for knob in knobs:
        add_rows(knob.resource, job.request.custom[knob.resource], knob.resource in resources)
    for name, value in _UNSETTABLE_KNOBS.items():
        add_rows(name, value, False)
    for knob in knobs:
        add_rows(f"{knob.resource}_min", str(min(knob.values)), False)
        add_rows(f"{knob.resource}_max", str(max(knob.values)), False)
    add_rows("jobenv", job.request.custom.get("jobenv", "linux2"), "jobenv" in resources)
    return rows


def node_rows(job: Job, node: int) -> List[StatisticsRow]:
    """The rows that ``-S`` adds for a node."""
    request = job.request
    first = node * request.processes_per_node
    ranks = range(first, min(first + request.processes_per_node, request.processes))
    x_nodes, y_nodes = request.dims[0], request.dims[1] if len(request.dims) > 1 else 1
    coordinates = (node % x_nodes, node // x_nodes % y_nodes, node // (x_nodes * y_nodes))
    return [
        ("VNODE ID", UNKNOWN),
        ("NODE ID", f"0x{0x01000000 + node:08X}"),
        ("TOFU COORDINATE", f"({','.join(map(str, coordinates[: len(request.dims)]))})"),
        ("RANK NO", " ".join(map(str, ranks)) or UNKNOWN),
        *((f"PERF COUNT {number}", UNKNOWN) for number in range(1, 10)),
    ]


def format_rows(rows: List[StatisticsRow]) -> str:
    """The rows as lines `` KEY : value``."""
    return "".join(f" {key:<{KEY_WIDTH}} : {value}\n" for key, value in rows)


def format_stats(job: Job, settings: Settings, state: str) -> str:
    """The text of the statistics file."""
    text = "Job Statistical Information\n\n" + format_rows(job_rows(job, settings, state)) + "\n"
    if job.request.stats == "S" and job.started:
        text += "-" * 80 + "\nNode Statistical Information\n\n"
        text += "\n".join(format_rows(node_rows(job, node)) for node in range(job.request.nodes)) + "\n"
    return text


def write_stats(job: Job, settings: Settings, state: str = "") -> None:
    """Write the statistics file if one is requested; a failure is reported in the daemon's log and ends no job."""
    if not job.request.stats:
        return
    path = stats_path(job)
    try:
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(format_stats(job, settings, state or job.state))
    except OSError as error:
        print(f"job {job.id}: {path}: {error.strerror}", file=sys.stderr, flush=True)


def statistics_values(job: Job, settings: Settings) -> Dict[str, str]:
    """The rows of a job by key, for ``pjstat -s``."""
    return dict(job_rows(job, settings, job.state))
