"""A rule for values that options do not take, beside those that rules of their subjects name (PJM019)."""

from __future__ import annotations

import datetime
import re
from typing import Callable, Dict, Iterator, Optional, Tuple

from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.registry import ERROR, UNSURE, Hit, rule
from fugaku_gpt.pjm.options import KEYS, MAIL_FLAGS, find_option
from fugaku_gpt.pjm.values import has_placeholder, parse_count, parse_flags, parse_limit, parse_size, parse_switch

_LEAST_AT, _MOST_PRIORITY = 8, 255


def _priority(text: str) -> None:
    if not 0 <= parse_count(text) <= _MOST_PRIORITY:
        raise ValueError(f"{text!r} is not a number from 0 to {_MOST_PRIORITY}")


def _start(text: str) -> None:
    if not re.fullmatch(r"\d{8}(?:\d{4})?", text):
        raise ValueError(f"{text!r} is not YYYYMMDD or YYYYMMDDhhmm")
    try:
        datetime.datetime.strptime(text, "%Y%m%d" if len(text) == _LEAST_AT else "%Y%m%d%H%M")
    except ValueError:
        raise ValueError(f"{text!r} is no date and time that there is") from None


def _mail(text: str) -> None:
    parse_flags(text, MAIL_FLAGS)


# canonical option → its reader, and whether a word may be a placeholder that is to be filled in
_OPTIONS: Dict[str, Tuple[Callable[[str], object], bool]] = {
    "mail": (_mail, False),
    "priority": (_priority, True),
    "at": (_start, True),
}
# kind of the value of a key → its reader; other kinds have rules of their own
_KINDS: Dict[str, Callable[[str], object]] = {
    "count": parse_count,
    "count?": lambda text: parse_limit(text, parse_count),
    "size?": lambda text: parse_limit(text, parse_size),
    "switch": parse_switch,
}
_HAVE_RULES = ("vnode-core", "vnode-mem", "core-mem", "gpu")  # of options that Fugaku does not have


@rule(
    "PJM019",
    ERROR,
    "a value that the option does not take",
    why="pjsub refuses values of another form than the manual's (PJM 0003, 0004).",
    fix="write the value as the manual does",
    source="Command Reference J2UL-2549, pjsub",
)
def wrong_value(facts: Facts) -> Iterator[Hit]:
    for directive in facts.script.directives:
        option = find_option(directive.option)
        text = directive.value
        if option is None or option.era != "tcs" or text is None or has_placeholder(text):
            continue
        read: Optional[Callable[[str], object]] = None
        may_be_word = True
        if directive.key is None and option.name in _OPTIONS:
            read, may_be_word = _OPTIONS[option.name]
        elif directive.key is not None and directive.key not in _HAVE_RULES:
            read = _KINDS.get(KEYS.get(option.name, {}).get(directive.key, ""))
        if read is None or (may_be_word and is_unfilled(text)):
            continue
        try:
            read(text)
        except ValueError as error:
            name = directive.option if directive.key is None else f"{directive.option} {directive.key}"
            column = facts.column(directive.line, text)
            yield Hit(
                directive.line, printable(f"{name}: {error}"), column, downgrade="" if facts.is_fugaku else UNSURE
            )
