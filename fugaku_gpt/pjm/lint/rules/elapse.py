"""Rules for the time limit (PJM040 to PJM044)."""

from __future__ import annotations

import re
from typing import Iterator, Optional

from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.registry import COMMAND_LINE, DATED, ERROR, INFO, RUNS, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FUGAKU
from fugaku_gpt.pjm.values import format_elapse, parse_elapse

_HOUR = 3600
_MINUTES_MEANT = 360  # a bare number up to here may well mean minutes
_HOURS_MEANT = 72  # `10:00` up to here may well mean hours and minutes
_SLURM_DAYS = re.compile(r"[0-9]{1,2}-[0-9]{1,2}(:[0-9]{1,2}){0,2}")
_SIGNALS = {"TERM", "SIGTERM", "15"}


def _elapse_position(facts: Facts) -> "tuple[str, int, int]":
    text = facts.resources.get("elapse") or ""
    return (text, *facts.position("resources.elapse", text))


@rule(
    "PJM040",
    ERROR,
    "no time limit, or one outside the group's range",
    why="Without elapse= a batch job on Fugaku gets one minute, which is also the least that can be asked for; more "
    "than the group's most is refused (PJM 0057). The ranges are data with a date.",
    fix='write -L "elapse=H:MM:SS" within the range of the group',
    source="Fugaku user guide 1.52, pjsubCommandOptions; Command Reference J2UL-2549, messages 0054 and 0057",
)
def elapse_range(facts: Facts) -> Iterator[Hit]:
    if "elapse" not in facts.resources:
        if facts.is_fugaku:
            message = "no elapse=: the job is ended after the default of one minute"
            yield Hit(facts.top, message, downgrade=COMMAND_LINE, is_absence=True)
        return
    text, line, column = _elapse_position(facts)
    elapse = facts.elapse
    if elapse is None:
        if not is_unfilled(text):
            try:
                parse_elapse(text)
            except ValueError as error:
                yield Hit(line, f"elapse={printable(text)}: {printable(error)}", column)
        return
    group = facts.group_limits
    if group is None or _SLURM_DAYS.fullmatch(text):
        return
    first, last, longest = elapse.minimum, elapse.maximum, group.longest(facts.nodes)
    if group.min_elapse and first is not None and first < group.min_elapse:
        message = f"elapse={text} is {_as_time(first)}, below the least of {group.name}, {_as_time(group.min_elapse)}"
        yield Hit(line, f"{message} (as of {group.date})", column, downgrade=DATED, date=group.date)
    elif group.name.startswith("spot-"):
        return  # PJM042 reports it
    elif longest and first is not None and first > longest:
        size = f" for {facts.nodes} nodes" if group.elapse_by_nodes and facts.nodes else ""
        message = f"elapse={text} is {_as_time(first)}, above the most of {group.name}{size}, {_as_time(longest)}"
        yield Hit(line, f"{message} (as of {group.date})", column, downgrade=DATED, date=group.date)
    elif elapse.is_range and group.range_max and last is not None and last > group.range_max:
        message = f"elapse={text} ends at {_as_time(last)}, above the most of {group.name}, {_as_time(group.range_max)}"
        yield Hit(line, f"{message} (as of {group.date})", column, downgrade=DATED, date=group.date)


@rule(
    "PJM041",
    WARNING,
    "the time limit may be read otherwise than meant",
    why="elapse=30 is 30 seconds and elapse=10:00 is 10 minutes, not 30 minutes and 10 hours; Slurm reads the first as "
    "minutes.",
    fix="write all three parts, H:MM:SS",
    source="Fugaku user guide 1.52, pjsubCommandOptions",
)
def ambiguous(facts: Facts) -> Iterator[Hit]:
    text, line, column = _elapse_position(facts)
    for part in text.strip().split("-") if not _SLURM_DAYS.fullmatch(text.strip()) else ():
        seconds: Optional[int] = None
        severity = ""
        if re.fullmatch(r"[0-9]{1,6}", part) and int(part) <= _MINUTES_MEANT:
            seconds = int(part)
        elif re.fullmatch(r"[0-9]{1,4}:[0-9]{1,2}", part) and int(part.partition(":")[0]) <= _HOURS_MEANT:
            seconds = int(part.partition(":")[0]) * 60 + int(part.partition(":")[2])
            severity = INFO  # MM:SS is how many write it on purpose
        if seconds is not None:
            message = f"elapse={text}: {part} is {_as_time(seconds)}"
            yield Hit(line, message, column, f"write {format_elapse(seconds)} if that is meant", severity=severity)
            return
        unsure = _unsure_form(part)
        if unsure:
            message = f"elapse={printable(text)}: {unsure}, and the manual does not say that pjsub takes it"
            time = parse_elapse(part).minimum or 0
            yield Hit(line, message, column, f"write {format_elapse(time)} if that is meant", severity=INFO)
            return


def _unsure_form(part: str) -> str:
    """Describe a form of a time that a person understands and the manual has not; empty for any other."""
    if re.fullmatch(r"(?:[0-9]{1,6}h)?(?:[0-9]{1,6}m)?", part, re.IGNORECASE) and part:
        return f"{part} has no seconds, as [[Hh]Mm]Ss has"
    match = re.fullmatch(r"(?:[0-9]{1,6}:)?[0-9]{1,6}:([0-9]{1,6})", part)
    sixty = [number for number in part.split(":")[1:] if int(number) > 59] if match else []
    return f"{sixty[0]} in {part} is more than 59" if sixty else ""


@rule(
    "PJM042",
    ERROR,
    "time limit too long for a spot- group",
    why="Low-priority groups take fixed limits of up to 4 hours, and ranges that start at up to 4 and end at up to 12 "
    "hours (spot-int 6): [ERR.] PJM 0057.",
    fix="write elapse=4:00:00, or a range such as elapse=4:00:00-12:00:00",
    source="Fugaku user guide 1.52, pjsubCommandOptions, low priority jobs",
    site=FUGAKU,
)
def spot(facts: Facts) -> Iterator[Hit]:
    elapse, group = facts.elapse, facts.group_limits
    if elapse is None or group is None or not group.name.startswith("spot-"):
        return
    text, line, column = _elapse_position(facts)
    if _SLURM_DAYS.fullmatch(text):
        return
    first, last = elapse.minimum, elapse.maximum
    if group.max_elapse and (first is None or first > group.max_elapse):
        verb = "starts" if elapse.is_range else "is"
        message = f"elapse={text} {verb} above the {_as_time(group.max_elapse)} of {group.name}"
        yield Hit(line, f"{message} (as of {group.date})", column, downgrade=DATED, date=group.date)
    elif elapse.is_range and last is not None and group.range_max and last > group.range_max:
        message = f"elapse={text} ends above the {_as_time(group.range_max)} of {group.name}"
        yield Hit(line, f"{message} (as of {group.date})", column, downgrade=DATED, date=group.date)


@rule(
    "PJM043",
    WARNING,
    "a range of time limits without a trap",
    why="After the lower end of the range the job may be sent SIGTERM, and then SIGKILL, at any moment. Without a "
    "trap or a checkpoint what was computed is lost. Whether the program itself catches the signal cannot be seen "
    "here.",
    fix="add `trap 'touch STOP' TERM` or the like, or add `# noqa: PJM043` where the program saves checkpoints",
    source="Fugaku user guide 1.52, pjsubCommandOptions, minimum elapsed time limit",
)
def untrapped(facts: Facts) -> Iterator[Hit]:
    elapse = facts.elapse
    if elapse is None or not elapse.is_range or not facts.is_shell:
        return
    text, line, column = _elapse_position(facts)
    if _SLURM_DAYS.fullmatch(text):
        return
    for command in facts.commands:
        if command.name == "trap" and _SIGNALS & {word.text.upper() for word in command.argv[1:]}:
            return
    yield Hit(line, f"elapse={text} is a range, and no command traps TERM", column)


@rule(
    "PJM044",
    ERROR,
    "days as Slurm writes them",
    why="1-00:00:00 is a day to Slurm; to pjsub it is the range from one second to none, and 1-12:00:00 the range "
    "from one second to twelve hours: the job may be ended after a second.",
    fix="write hours: a day is 24:00:00",
    source="Command Reference J2UL-2549, pjsub, -L elapse",
)
def slurm_days(facts: Facts) -> Iterator[Hit]:
    elapse = facts.elapse
    text, line, column = _elapse_position(facts)
    if elapse is None or elapse.minimum is None:
        return
    if _SLURM_DAYS.fullmatch(text.strip()):
        days, _, rest = text.strip().partition("-")
        refused = elapse.maximum is not None and elapse.maximum < elapse.minimum
        seconds = int(days) * 24 * _HOUR + _slurm_seconds(rest)
        meaning = (
            f"{_days(int(days))} meant" if seconds == int(days) * 24 * _HOUR else "Slurm's days and hours are meant"
        )
        message = f"elapse={text} is a range from {_as_time(elapse.minimum)} to {_as_time(elapse.maximum or 0)}"
        yield Hit(line, message, column, f"write {format_elapse(seconds)} if {meaning}", "" if refused else RUNS)
    elif elapse.is_range and elapse.maximum is not None and elapse.maximum < elapse.minimum:
        message = f"elapse={text} is a range that ends before it starts"
        yield Hit(line, message, column, "write the shorter time first")


def _days(count: int) -> str:
    return "1 day is" if count == 1 else f"{count} days are"


def _slurm_seconds(text: str) -> int:
    hours, minutes, seconds = ([int(part) for part in text.split(":")] + [0, 0])[:3]
    return hours * _HOUR + minutes * 60 + seconds


def _as_time(seconds: int) -> str:
    """Format ``90 s``, ``10 minutes`` or ``24 hours``; anything else as ``H:MM:SS``."""
    if seconds < 120:
        return f"{seconds} s"
    if seconds % 3600 == 0:
        return f"{seconds // 3600} hour" + ("s" if seconds > 3600 else "")
    return f"{seconds // 60} minutes" if seconds % 60 == 0 and seconds < 7200 else format_elapse(seconds)
