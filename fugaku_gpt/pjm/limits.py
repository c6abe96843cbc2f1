"""A site's limits as its commands print them: ``pjacl --rg GROUP`` (per job) and ``pjstat --limit`` (per user, group).

``pjacl`` prints, among much else, tables such as this one of the Fugaku user guide, with names in brackets::

    pjsub option parameters
        (-L/--rsc-list)                  lower            upper            default
            (elapse=)                    00:01:00         72:00:00         00:01:00
            (adaptive elapsed time max)  00:01:01         144:00:00        144:00:00 # a remark
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple

from fugaku_gpt.pjm.values import UNLIMITED, parse_count, parse_elapse, parse_shape, parse_size

BATCH = "-L/--rsc-list"
INTERACTIVE = "--interact -L"
_LINE_LENGTH = 4096  # characters of a line that are parsed
_HEADING = re.compile(r"[ \t]*\(([^()]{1,100})\)[ \t]+lower[ \t]+upper[ \t]+default\b", re.IGNORECASE)
_ROW = re.compile(r"[ \t]*\(([^()=]{1,100})=?[ \t]*\)[ \t]+(\S+)[ \t]+(\S+)(?:[ \t]+(\S+))?[ \t]*")
_REMARK = re.compile(r"[ \t]#.*")
_OWNER = re.compile(r"[ \t]*(RSCUNIT|RSCGRP|USER|GROUP|ALL)[ \t]*:[ \t]*(\S*)[ \t]*")
_USAGE_ROW = re.compile(r"[ \t]*([a-z][a-z0-9_-]{1,60})[ \t]+(unlimited|\d{1,15})[ \t]+(\d{1,15})[ \t]*")


@dataclass(frozen=True)
class Limit:
    """A row of ``pjacl``.

    Attributes:
        option: the option that the table is about, such as ``-L/--rsc-list``.
        name: such as ``elapse``.
        lower, upper, default: as printed; ``default`` is empty where the row has none.
    """

    option: str
    name: str
    lower: str
    upper: str
    default: str


@dataclass(frozen=True)
class AclLimits:
    """The limits of one resource group for one user and group, as ``pjacl`` prints them."""

    rows: Tuple[Limit, ...]

    def row(self, name: str, option: str = BATCH) -> Optional[Limit]:
        """Return the row of that name; None if the table has none."""
        return next((row for row in self.rows if row.name == name and _is_same_option(row.option, option)), None)

    def seconds(self, name: str = "elapse", option: str = BATCH) -> Optional[Tuple[Optional[int], ...]]:
        """Lower limit, upper limit and default in seconds; each None if unlimited or not a time."""
        return self._read(name, option, _seconds)

    def nodes(self, name: str = "node", option: str = BATCH) -> Optional[Tuple[Optional[int], ...]]:
        """Lower limit, upper limit and default as a number of nodes (the product of a shape)."""
        return self._read(name, option, _nodes)

    def sizes(self, name: str, option: str = BATCH) -> Optional[Tuple[Optional[int], ...]]:
        """Lower limit, upper limit and default in bytes."""
        return self._read(name, option, parse_size)

    def counts(self, name: str, option: str = BATCH) -> Optional[Tuple[Optional[int], ...]]:
        """Lower limit, upper limit and default as numbers."""
        return self._read(name, option, parse_count)

    def _read(
        self, name: str, option: str, reader: Callable[[str], Optional[int]]
    ) -> Optional[Tuple[Optional[int], ...]]:
        row = self.row(name, option)
        if row is None:
            return None
        return tuple(_value(text, reader) for text in (row.lower, row.upper, row.default))


@dataclass(frozen=True)
class LimitUsage:
    """A row of ``pjstat --limit``.

    Attributes:
        unit: resource unit; empty if not given.
        scope: ``USER``, ``GROUP`` or ``ALL``.
        owner: name of the user or group; empty for all.
        name: such as ``ru-accept``, the number of batch jobs accepted at a time.
        limit: None where unlimited.
        used: amount in use.
    """

    unit: str
    scope: str
    owner: str
    name: str
    limit: Optional[int]
    used: int


def parse_acl(text: str) -> AclLimits:
    """Parse the tables of ``pjacl`` and skip everything else. Rows above the first table count as those of ``-L``."""
    option = BATCH
    rows = []
    for line in text.split("\n"):
        line = _REMARK.sub("", line.rstrip("\r")[:_LINE_LENGTH])
        heading = _HEADING.match(line)
        if heading:
            option = heading[1].strip()
            continue
        row = _ROW.fullmatch(line)
        if row:
            rows.append(Limit(option, row[1].strip(), row[2], row[3], row[4] or ""))
    return AclLimits(tuple(rows))


def parse_limit_usage(text: str) -> List[LimitUsage]:
    """Parse the rows of ``pjstat --limit``."""
    unit, scope, owner = "", "", ""
    rows = []
    for line in text.split("\n"):
        line = _REMARK.sub("", line.rstrip("\r")[:_LINE_LENGTH])
        head = _OWNER.fullmatch(line)
        if head and head[1] == "RSCUNIT":
            unit, scope, owner = head[2], "", ""
        elif head:
            scope, owner = head[1], head[2]
        else:
            row = _USAGE_ROW.fullmatch(line)
            if row:
                limit = None if row[2] == UNLIMITED else int(row[2])
                rows.append(LimitUsage(unit, scope, owner, row[1], limit, int(row[3])))
    return rows


def _is_same_option(written: str, option: str) -> bool:
    return "".join(written.split()) == "".join(option.split())


def _value(text: str, reader: Callable[[str], Optional[int]]) -> Optional[int]:
    if text.lower() == UNLIMITED:
        return None
    try:
        return reader(text)
    except ValueError:
        return None


def _seconds(text: str) -> Optional[int]:
    return parse_elapse(text).minimum


def _nodes(text: str) -> int:
    count = 1
    for size in parse_shape(text.split(":")[0]):
        count *= size
    return count
