"""``pjstat``: the jobs as tables, as comma-separated data and as statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

from fugaku_gpt.simulator.call import Call, Reply, message
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.columns import BY_ITEM, DEFAULT, VERBOSE, Column, chosen
from fugaku_gpt.simulator.faults import GARBAGE, Faults
from fugaku_gpt.simulator.job import Job
from fugaku_gpt.simulator.limits import format_limits
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.stats import format_rows, node_rows, rows
from fugaku_gpt.simulator.table import Table

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


class BadCommand(Exception):
    """A command line that ``pjstat`` refuses."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass
class Options:
    """What was asked for."""

    flags: List[str] = field(default_factory=list)
    delimiter: str = ","
    items: List[str] = field(default_factory=list)
    filters: Dict[str, List[str]] = field(default_factory=dict)
    order: List[Tuple[str, bool]] = field(default_factory=list)  # item, descending
    since: Optional[float] = None  # history from here; None: no history
    until: float = 0.0
    ids: List[str] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return flag in self.flags


def pjstat(call: Call, table: Table, settings: Settings, faults: Faults) -> Reply:
    """One query."""
    if faults.fails():
        return Reply(err=message("pjstat", 290, "Job manager is not present."), code=1, delay=faults.slow_seconds)
    if faults.garbage():
        return Reply(out=GARBAGE, delay=faults.slow_seconds)
    now = time.time()
    try:
        options = read_options(call.words, now)
        text = HELP if options.has("--help") else answer(options, table, settings, now)
    except BadCommand as error:
        return Reply(err=message("pjstat", error.code, error.text), code=1, delay=faults.slow_seconds)
    return Reply(out=text, delay=faults.slow_seconds)


def answer(options: Options, table: Table, settings: Settings, now: float) -> str:
    """What ``pjstat`` prints."""
    if options.has("--limit"):
        return format_limits(table, settings)
    if options.has("--rsc"):
        return f"RSCUNIT                    STATUS   NODE\nrscunit_ft01[ENABLE,START] {settings.nodes}\n"
    jobs = select(options, table)
    if options.has("--summary"):
        return format_summary(jobs, table)
    text = format_summary(jobs, table) + "\n" if options.has("--with-summary") else ""
    expanded = expand(jobs, options, table)
    if options.has("--data"):
        return text + format_data(expanded, options, now)
    if options.has("-s") or options.has("-S"):
        return text + format_statistics(expanded, options, settings)
    items = options.items or list(VERBOSE if options.has("-v") else DEFAULT)
    return text + format_table(expanded, chosen(items), now)


# --- the command line ---------------------------------------------------------------------------------------------


def read_options(words: List[str], now: float) -> Options:
    """Take the command line apart.

    Raises:
        BadCommand: an option or an id is not known.
    """
    options = Options()
    at = 0
    while at < len(words):
        word = words[at]
        spelling, equals, argument = word.partition("=")
        if word in ("-H", "--history") or (spelling in ("-H", "--history") and equals):
            following = words[at + 1] if at + 1 < len(words) else ""
            if equals:
                period = argument
            elif following.split("=")[0] in ("day", "start", "end", "period"):
                period = following
                at += 1
            else:
                period = ""
            _read_period(options, period, now)
        elif spelling in _TEXT_OPTIONS:
            if not equals:
                at += 1
                if at >= len(words):
                    raise BadCommand(201, f"Option {word} needs an argument.")
                argument = words[at]
            _read_text(options, spelling, argument)
        elif word in _LONG or word in _FLAGS:
            options.flags.append(_LONG.get(word, word))
        elif word.startswith("-") and not word.startswith("--") and all("-" + x in _FLAGS + ("-H",) for x in word[1:]):
            for letter in word[1:]:
                if letter == "H":
                    _read_period(options, "", now)
                else:
                    options.flags.append("-" + letter)
        elif word.startswith("-"):
            raise BadCommand(201, f"Invalid option {word}.")
        else:
            options.ids.append(word)
        at += 1
    return options


def _read_text(options: Options, spelling: str, argument: str) -> None:
    if spelling == "--delimiter":
        options.delimiter = argument
        return
    for part in filter(None, argument.split(",")):
        if spelling == "--choose":
            options.items.append(_item(part))
        elif spelling == "--filter":
            item, _, values = part.partition("=")
            options.filters.setdefault(_item(item), []).extend(values.split("+"))
        else:
            item, _, direction = part.partition(":")
            if direction not in ("", "A", "D"):
                raise BadCommand(203, f"Invalid argument {part}.")
            options.order.append((_item(item), direction == "D"))


def _item(name: str) -> str:
    if name not in BY_ITEM:
        raise BadCommand(203, f"Invalid item {name}.")
    return name


def _read_period(options: Options, text: str, now: float) -> None:
    options.until = now + 1
    if not text:
        options.since = now - HISTORY_DAYS * DAY
        return
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if set(parts) == {"day"}:
        if not parts["day"].isdigit() or not 1 <= int(parts["day"]) <= 365:
            raise BadCommand(203, f"Invalid argument {text}.")
        options.since = now - int(parts["day"]) * DAY
        return
    start = _date(parts.pop("start", ""))
    options.since = start
    if "end" in parts:
        options.until = _date(parts.pop("end")) + DAY
    elif "period" in parts:
        period = parts.pop("period")
        if not period.isdigit():
            raise BadCommand(203, f"Invalid argument {text}.")
        options.until = start + int(period) * DAY
    if parts:
        raise BadCommand(203, f"Invalid argument {text}.")


def _date(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y%m%d"))
    except ValueError:
        raise BadCommand(203, f"Invalid argument {text}.") from None


# --- which jobs ---------------------------------------------------------------------------------------------------


def select(options: Options, table: Table) -> List[Job]:
    """The jobs that are meant, sub-jobs only where they are named; what is not known is left out without a word.

    Raises:
        BadCommand: an id is none.
    """
    if options.ids:
        named = []
        for text in options.ids:
            jobs, ids = table.named(text)
            if ids is None:
                raise BadCommand(211, f"Invalid job ID {text}.")
            named.extend(jobs)
    else:
        named = list(table.top())
    seen = set()
    found = []
    for job in named:
        parent = table.parent(job)
        whole_over = parent.over if parent is not None else job.over  # sub-jobs go to the history with their parent
        if options.since is None:
            wanted = not whole_over
        else:
            wanted = whole_over and options.since <= job.dates.get("exit", 0.0) <= options.until
        if wanted and job.id not in seen:
            seen.add(job.id)
            found.append(job)
    return found


def expand(jobs: List[Job], options: Options, table: Table) -> List[Job]:
    """With their sub-jobs where asked, filtered and sorted."""
    found: List[Job] = []
    for job in jobs:
        found.append(job)
        if options.has("-E") and job.parent:
            found.extend(table.subs(job))
    now = time.time()
    for item, values in options.filters.items():
        found = [job for job in found if any(_matches(BY_ITEM[item].value(job, now), value) for value in values)]
    for item, descending in reversed(options.order):
        found.sort(key=_sort_key(BY_ITEM[item], now), reverse=descending)
    return found


def _matches(value: str, wanted: str) -> bool:
    """Equal, or inside a range of numbers such as ``1-10``."""
    low, dash, high = wanted.partition("-")
    if dash and low.isdigit() and high.isdigit() and value.isdigit():
        return int(low) <= int(value) <= int(high)
    return value == wanted


def _sort_key(column: Column, now: float) -> Callable[[Job], Tuple[int, str]]:
    if column.item == "jid":
        return lambda job: (job.number, f"{-1 if job.sub is None else job.sub:08d}")

    def key(job: Job) -> Tuple[int, str]:
        value = column.value(job, now)
        return (int(value), "") if value.isdigit() else (0, value)

    return key


# --- how they are printed -----------------------------------------------------------------------------------------


def format_table(jobs: List[Job], columns: List[Column], now: float) -> str:
    """Columns padded to their widths; names, groups and reasons cut."""
    lines = [" ".join(column.title.ljust(column.width) for column in columns)]
    for job in jobs:
        cells = []
        for column in columns:
            value = column.value(job, now)
            cells.append((value[: column.cut] if column.cut else value).ljust(column.width))
        lines.append(" ".join(cells))
    return "".join(line + "\n" for line in lines)


def format_data(jobs: List[Job], options: Options, now: float) -> str:
    """``--data``: a header line that starts with ``H``, rows that start with an empty field."""
    full = options.has("-s") or options.has("-S")
    items = options.items or list(VERBOSE if options.has("-v") or full else DEFAULT)
    columns = [column for column in chosen(items) if full or not column.extra]
    lines = [["H", *(column.full_title if full and column.full_title else column.title for column in columns)]]
    for job in jobs:
        cells = [(column.full or column.value)(job, now) if full else column.value(job, now) for column in columns]
        lines.append(["", *cells])
    return "".join(options.delimiter.join(line) + "\n" for line in lines)


def format_statistics(jobs: List[Job], options: Options, settings: Settings) -> str:
    """``-s``: every row of each job; ``-S``: of its nodes too."""
    text = ""
    for job in jobs:
        text += "\n" + format_rows(rows(job, settings, job.state))
        if options.has("-S") and job.started:
            text += "\n" + "\n".join(format_rows(node_rows(job, node)) for node in range(job.request.nodes))
    return text + "\n" if text else ""


def format_summary(jobs: List[Job], table: Table) -> str:
    """Counts by state: of jobs, and below with sub-jobs counted."""
    titles = [title for title, _ in _SUMMARY] + ["TOTAL"]
    lines = [" " + "".join(f"{title:>7}" for title in titles)]
    with_subs = [unit for job in jobs for unit in table.running_units(job)]
    for letter, counted in ((" ", jobs), ("s", with_subs)):
        counts = [sum(job.state in states for job in counted) for _, states in _SUMMARY]
        lines.append(letter + "".join(f"{count:>7}" for count in [*counts, len(counted)]))
    return "".join(line + "\n" for line in lines)
