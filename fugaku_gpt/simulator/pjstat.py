"""``pjstat``: jobs as tables, as comma-separated data and as statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.columns import BY_ITEM, DEFAULT, VERBOSE, Column, columns_of
from fugaku_gpt.simulator.faults import GARBAGE, Faults
from fugaku_gpt.simulator.job import Job
from fugaku_gpt.simulator.limits import format_limits
from fugaku_gpt.simulator.protocol import Invocation, Reply, pjm_message
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.stats import format_rows, job_rows, node_rows
from fugaku_gpt.simulator.table import JobTable

DAY = 86400.0
HISTORY_DAYS = 3
HELP = f"""pjstat ({BANNER})
Usage: pjstat [option] [job-id...]
  -v  -s|-S  -E  -A  -H|--history [day=n | start=date,end=date]  --data [--delimiter x]  --choose item[,...]
  --filter item=value[+value][,...]  --sort item:A|D[,...]  --summary  --with-summary  --limit  --rsc
"""
_SUMMARY = (
    ("ACCEPT", ("ACC",)),
    ("QUEUED", ("QUE",)),
    ("RUNING", ("RNA", "RNP", "RUN")),
    ("RUNOUT", ("RNE", "RNO")),
    ("HOLD", ("HLD",)),
    ("ERROR", ("ERR",)),
    ("REJECT", ("RJT",)),
    ("EXIT", ("EXT",)),
    ("CANCEL", ("CCL",)),
)
_TEXT_OPTIONS = ("--delimiter", "--choose", "--filter", "--sort")
_FLAGS = ("-v", "-s", "-S", "-E", "-A", "--data", "--summary", "--with-summary", "--limit", "--rsc", "--help")
_LONG = {"--verbose": "-v", "--stats": "-s", "--STATS": "-S", "--expand": "-E", "--all": "-A"}


class BadArguments(Exception):
    """A command line that ``pjstat`` refuses."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass
class PjstatOptions:
    """The parsed command line of ``pjstat``; ``since`` and ``until`` are seconds since the epoch."""

    flags: List[str] = field(default_factory=list)
    delimiter: str = ","
    items: List[str] = field(default_factory=list)
    filters: Dict[str, List[str]] = field(default_factory=dict)
    order: List[Tuple[str, bool]] = field(default_factory=list)  # item, descending
    since: Optional[float] = None  # start of the history; None: jobs that have not finished
    until: float = 0.0
    ids: List[str] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return flag in self.flags


def pjstat(invocation: Invocation, table: JobTable, settings: Settings, faults: Faults) -> Reply:
    """Reply to one query, subject to the faults that are pending."""
    if faults.take_pjstat_failure():
        return Reply(err=pjm_message("pjstat", 290, "Job manager is not present."), code=1, delay=faults.slow_seconds)
    if faults.take_garbage_output():
        return Reply(out=GARBAGE, delay=faults.slow_seconds)
    timestamp = time.time()
    try:
        options = parse_options(invocation.arguments, timestamp)
        text = HELP if options.has("--help") else query_output(options, table, settings, timestamp)
    except BadArguments as error:
        return Reply(err=pjm_message("pjstat", error.code, error.text), code=1, delay=faults.slow_seconds)
    return Reply(out=text, delay=faults.slow_seconds)


def query_output(options: PjstatOptions, table: JobTable, settings: Settings, timestamp: float) -> str:
    """The output of ``pjstat``."""
    if options.has("--limit"):
        return format_limits(table, settings)
    if options.has("--rsc"):
        return f"RSCUNIT                    STATUS   NODE\nrscunit_ft01[ENABLE,START] {settings.nodes}\n"
    jobs = select_jobs(options, table)
    if options.has("--summary"):
        return format_summary(jobs, table)
    text = format_summary(jobs, table) + "\n" if options.has("--with-summary") else ""
    expanded = expand_and_sort(jobs, options, table)
    if options.has("--data"):
        return text + format_data(expanded, options, timestamp)
    if options.has("-s") or options.has("-S"):
        return text + format_statistics(expanded, options, settings)
    items = options.items or list(VERBOSE if options.has("-v") else DEFAULT)
    return text + format_table(expanded, columns_of(items), timestamp)


# --- the command line ---------------------------------------------------------------------------------------------


def parse_options(arguments: List[str], timestamp: float) -> PjstatOptions:
    """Parse the command line; ``timestamp`` is the current time in seconds since the epoch.

    Raises:
        BadArguments: an option, an item or a date is not valid.
    """
    options = PjstatOptions()
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        spelling, equals, value = argument.partition("=")
        if argument in ("-H", "--history") or (spelling in ("-H", "--history") and equals):
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            if equals:
                period = value
            elif following.split("=")[0] in ("day", "start", "end", "period"):
                period = following
                index += 1
            else:
                period = ""
            _read_period(options, period, timestamp)
        elif spelling in _TEXT_OPTIONS:
            if not equals:
                index += 1
                if index >= len(arguments):
                    raise BadArguments(201, f"Option {argument} needs an argument.")
                value = arguments[index]
            _read_text(options, spelling, value)
        elif argument in _LONG or argument in _FLAGS:
            options.flags.append(_LONG.get(argument, argument))
        elif (
            argument.startswith("-")
            and not argument.startswith("--")
            and all("-" + letter in _FLAGS + ("-H",) for letter in argument[1:])
        ):
            for letter in argument[1:]:
                if letter == "H":
                    _read_period(options, "", timestamp)
                else:
                    options.flags.append("-" + letter)
        elif argument.startswith("-"):
            raise BadArguments(201, f"Invalid option {argument}.")
        else:
            options.ids.append(argument)
        index += 1
    return options


def _read_text(options: PjstatOptions, spelling: str, value: str) -> None:
    if spelling == "--delimiter":
        options.delimiter = value
        return
    for field_text in filter(None, value.split(",")):
        if spelling == "--choose":
            options.items.append(_checked_item(field_text))
        elif spelling == "--filter":
            item, _, values = field_text.partition("=")
            options.filters.setdefault(_checked_item(item), []).extend(values.split("+"))
        else:
            item, _, direction = field_text.partition(":")
            if direction not in ("", "A", "D"):
                raise BadArguments(203, f"Invalid argument {field_text}.")
            options.order.append((_checked_item(item), direction == "D"))


def _checked_item(name: str) -> str:
    if name not in BY_ITEM:
        raise BadArguments(203, f"Invalid item {name}.")
    return name


def _read_period(options: PjstatOptions, text: str, timestamp: float) -> None:
    options.until = timestamp + 1
    if not text:
        options.since = timestamp - HISTORY_DAYS * DAY
        return
    fields = dict(field_text.partition("=")[::2] for field_text in text.split(","))
    if set(fields) == {"day"}:
        if not fields["day"].isdecimal() or not 1 <= int(fields["day"]) <= 365:
            raise BadArguments(203, f"Invalid argument {text}.")
        options.since = timestamp - int(fields["day"]) * DAY
        return
    start = _date(fields.pop("start", ""))
    options.since = start
    if "end" in fields:
        options.until = _date(fields.pop("end")) + DAY
    elif "period" in fields:
        period = fields.pop("period")
        if not period.isdecimal():
            raise BadArguments(203, f"Invalid argument {text}.")
        options.until = start + int(period) * DAY
    if fields:
        raise BadArguments(203, f"Invalid argument {text}.")


def _date(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y%m%d"))
    except ValueError:
        raise BadArguments(203, f"Invalid argument {text}.") from None


# --- which jobs ---------------------------------------------------------------------------------------------------


def select_jobs(options: PjstatOptions, table: JobTable) -> List[Job]:
    """The jobs that the options select, sub-jobs only if they are named; unknown jobs are left out silently.

    Raises:
        BadArguments: a job id is malformed.
    """
    if options.ids:
        candidates = []
        for job_id in options.ids:
            jobs, ids = table.resolve_ids(job_id)
            if ids is None:
                raise BadArguments(211, f"Invalid job ID {job_id}.")
            candidates.extend(jobs)
    else:
        candidates = list(table.top_level_jobs())
    seen_ids = set()
    selected = []
    for job in candidates:
        parent = table.parent(job)
        # sub-jobs enter the history with their parent
        is_past = parent.is_finished if parent is not None else job.is_finished
        if options.since is None:
            is_selected = not is_past
        else:
            is_selected = is_past and options.since <= job.dates.get("exit", 0.0) <= options.until
        if is_selected and job.id not in seen_ids:
            seen_ids.add(job.id)
            selected.append(job)
    return selected


def expand_and_sort(jobs: List[Job], options: PjstatOptions, table: JobTable) -> List[Job]:
    """The jobs, with their sub-jobs if requested, filtered and sorted."""
    jobs_shown: List[Job] = []
    for job in jobs:
        jobs_shown.append(job)
        if options.has("-E") and job.parent:
            jobs_shown.extend(table.sub_jobs(job))
    timestamp = time.time()
    for item, values in options.filters.items():
        jobs_shown = [
            job for job in jobs_shown if any(_matches(BY_ITEM[item].value(job, timestamp), value) for value in values)
        ]
    for item, descending in reversed(options.order):
        jobs_shown.sort(key=_sort_key(BY_ITEM[item], timestamp), reverse=descending)
    return jobs_shown


def _matches(value: str, pattern: str) -> bool:
    """Whether a value equals a pattern, or is inside a range of numbers such as ``1-10``."""
    low, dash, high = pattern.partition("-")
    if dash and low.isdecimal() and high.isdecimal() and value.isdecimal():
        return int(low) <= int(value) <= int(high)
    return value == pattern


def _sort_key(column: Column, timestamp: float) -> Callable[[Job], Tuple[int, str]]:
    if column.item == "jid":
        return lambda job: (job.number, f"{-1 if job.sub is None else job.sub:08d}")

    def key(job: Job) -> Tuple[int, str]:
        value = column.value(job, timestamp)
        return (int(value), "") if value.isdecimal() else (0, value)

    return key


# --- output -------------------------------------------------------------------------------------------------------


def format_table(jobs: List[Job], columns: List[Column], timestamp: float) -> str:
    """The table, with columns padded to their widths, and names, groups and reasons truncated."""
    lines = [" ".join(column.title.ljust(column.width) for column in columns)]
    for job in jobs:
        cells = []
        for column in columns:
            value = column.value(job, timestamp)
            cells.append((value[: column.max_characters] if column.max_characters else value).ljust(column.width))
        lines.append(" ".join(cells))
    return "".join(line + "\n" for line in lines)


def format_data(jobs: List[Job], options: PjstatOptions, timestamp: float) -> str:
    """The output of ``--data``: a header line that starts with ``H``, and rows that start with an empty field."""
    full = options.has("-s") or options.has("-S")
    items = options.items or list(VERBOSE if options.has("-v") or full else DEFAULT)
    columns = [column for column in columns_of(items) if full or not column.is_statistics_only]
    lines = [["H", *(column.full_title if full and column.full_title else column.title for column in columns)]]
    for job in jobs:
        cells = [
            (column.full or column.value)(job, timestamp) if full else column.value(job, timestamp)
            for column in columns
        ]
        lines.append(["", *cells])
    return "".join(options.delimiter.join(line) + "\n" for line in lines)


def format_statistics(jobs: List[Job], options: PjstatOptions, settings: Settings) -> str:
    """The output of ``-s``, every row of each job, or of ``-S``, which adds the rows of its nodes."""
    text = ""
    for job in jobs:
        text += "\n" + format_rows(job_rows(job, settings, job.state))
        if options.has("-S") and job.started:
            text += "\n" + "\n".join(format_rows(node_rows(job, node)) for node in range(job.request.nodes))
    return text + "\n" if text else ""


def format_summary(jobs: List[Job], table: JobTable) -> str:
    """Numbers of jobs by state, and below them numbers that include sub-jobs."""
    titles = [title for title, _ in _SUMMARY] + ["TOTAL"]
    lines = [" " + "".join(f"{title:>7}" for title in titles)]
    with_sub_jobs = [unit for job in jobs for unit in table.execution_units(job)]
    for prefix, counted in ((" ", jobs), ("s", with_sub_jobs)):
        counts = [sum(job.state in states for job in counted) for _, states in _SUMMARY]
        lines.append(prefix + "".join(f"{count:>7}" for count in [*counts, len(counted)]))
    return "".join(line + "\n" for line in lines)
