"""The tables of ``pjstat``: ``--data`` (comma lists) and the tables for people, both parsed by their header line.

Sites hide and reorder columns, and real systems do not keep the order of ``--choose``: no column is found by position.
"""

from __future__ import annotations

import csv
import re
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

from fugaku_gpt.pjm.codes import state_of
from fugaku_gpt.pjm.jobids import ID_PATTERN, ROW_ID_PATTERN
from fugaku_gpt.records.job import JobStatus

DEFAULT_COLUMNS = (
    "JOB_ID",
    "JOB_NAME",
    "MD",
    "ST",
    "USER",
    "START_DATE",
    "ELAPSE_LIM",
    "NODE_REQUIRE",
    "VNODE",
    "CORE",
    "V_MEM",
)
VERBOSE_COLUMNS = (
    *("JOB_ID", "JOB_NAME", "MD", "ST", "USER", "GROUP", "START_DATE", "ELAPSE_TIM", "ELAPSE_LIM", "NODE_REQUIRE"),
    *(
        "VNODE",
        "CORE",
        "V_MEM",
        "V_POL",
        "E_POL",
        "RANK",
        "LST",
        "EC",
        "PC",
        "SN",
        "PRI",
        "ACCEPT",
        "RSC_GRP",
        "REASON",
    ),
)
MODELS = ("NM", "ST", "BU", "MW")
# a column's name in tables and in the long form of -s
_COLUMNS_BY_FIELD = {
    "job_id": ("JOB_ID", "JOB ID"),
    "state": ("ST", "STATE", "STATUS"),
    "exit_code": ("EC", "EXIT CODE"),
    "code": ("PC", "PJM CODE"),
    "signal": ("SN", "SIGNAL NO"),
    "reason": ("REASON", "ERMSG"),
    "group": ("RSC_GRP", "RSCGRP", "RSCG", "RESOURCE GROUP"),
}
_DATE_COLUMNS = ("START_DATE", "ACCEPT")
_FREE_TEXT_COLUMNS = ("REASON", "COMMENT", "CMT")
_LINE_LENGTH = 65536  # characters of a line that are parsed
_JOB = re.compile(ROW_ID_PATTERN, re.ASCII)
_ID = re.compile(ID_PATTERN)
_DAY = re.compile(r"\(?\d{1,4}/\d{1,2}(?:/\d{1,2})?")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?\)?[<@#]?")
_SECONDS = re.compile(r"\((\d{1,15})\)")
_TIME = re.compile(r"(?:(\d{1,6})[ \t]+)?(\d{1,9}):(\d{1,2}):(\d{1,2})")
_INTEGER = re.compile(r"-?\d{1,15}", re.ASCII)
_DEFAULT = "<DEFAULT>"


def parse_data(text: str, delimiter: str = ",") -> List[Dict[str, str]]:
    """Return the rows of ``pjstat --data [--delimiter X]`` as header name → text.

    Lines before a header line, such as the notice that data are being loaded, are skipped.
    """
    header: Optional[List[str]] = None
    rows = []
    for line in text.split("\n"):
        cells = _cells(line.rstrip("\r")[:_LINE_LENGTH], delimiter)
        if cells[0] == "H" and len(cells) > 1:
            header = cells[1:]
        elif header is not None and cells[0] == "" and len(cells) > 1:
            rows.append(_row(header, cells[1:], delimiter))
    return rows


def _cells(line: str, delimiter: str) -> List[str]:
    if '"' in line and len(delimiter) == 1:
        try:
            cells = next(csv.reader([line.replace("\0", "")], delimiter=delimiter), [""])
        except csv.Error:
            cells = line.split(delimiter)
    else:
        cells = line.split(delimiter)
    return [part.strip() for part in cells] or [""]


def _row(header: List[str], cells: List[str], delimiter: str) -> Dict[str, str]:
    """Return cells by name; too many mean that free text holds the delimiter, too few that the end is missing."""
    extra = len(cells) - len(header)
    if extra > 0:
        free = [index for index, name in enumerate(header) if name.upper() in _FREE_TEXT_COLUMNS]
        at = free[0] if free else len(header) - 1
        cells = [*cells[:at], delimiter.join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]
    return dict(zip(header, cells))


def parse_table(text: str) -> List[Dict[str, str]]:
    """Return the rows of ``pjstat`` or ``pjstat -v`` as header name → text.

    A date takes one or two words, a reason any number of words. Rows without a header above them are read with the
    default or the verbose columns, depending on the number of words.
    """
    header: Optional[Sequence[str]] = None
    rows = []
    for line in text.split("\n"):
        tokens = line[:_LINE_LENGTH].split()
        if "JOB_ID" in tokens:
            header = tokens
        elif tokens and _JOB.fullmatch(tokens[0]):
            if header is not None:
                rows.append(_table_row(header, tokens))
            elif len(tokens) > 3 and tokens[2] in MODELS:
                usual = VERBOSE_COLUMNS if len(tokens) >= len(VERBOSE_COLUMNS) - 2 else DEFAULT_COLUMNS
                rows.append(_table_row(usual, tokens))
    return rows


def _table_row(header: Sequence[str], tokens: List[str]) -> Dict[str, str]:
    row: Dict[str, str] = {}
    start = 0
    for index, name in enumerate(header):
        if start >= len(tokens):
            row[name] = ""
            continue
        width = 1
        if name in _DATE_COLUMNS:
            width = _date_width(tokens, start)
        elif name in _FREE_TEXT_COLUMNS:
            width = max(1, len(tokens) - start - (len(header) - index - 1))
        elif name == "JOB_NAME":
            width = _name_width(header, tokens, index, start)
        row[name] = " ".join(tokens[start : start + width])
        start += width
    return row


def _date_width(tokens: List[str], start: int) -> int:
    width = 1
    if _DAY.fullmatch(tokens[start]) and start + 1 < len(tokens) and _CLOCK.fullmatch(tokens[start + 1]):
        width = 2
    if tokens[start] != "-" and start + width < len(tokens) and tokens[start + width] in ("<", "@", "#"):
        width += 1
    return width


def _name_width(header: Sequence[str], tokens: List[str], index: int, start: int) -> int:
    """Return the number of words of a job name, which may hold blanks: it ends before the job's model and state."""
    if "MD" not in header[index + 1 : index + 2]:
        return 1
    for end in range(start + 1, min(len(tokens) - 1, start + 12)):
        if tokens[end] in MODELS and tokens[end + 1].isupper():
            return end - start
    return 1


def clean_value(text: str) -> Optional[str]:
    """Return a value without the mark of a default; None for ``-`` and an empty value."""
    value = text[:_LINE_LENGTH].strip()
    if value.endswith(_DEFAULT):
        value = value[: -len(_DEFAULT)].rstrip()
    return None if value in ("", "-") else value


def parse_seconds(text: str) -> Optional[int]:
    """Return the seconds of ``1 00:00:00 (86400)``, ``0001:00:00`` or ``00:01:30``; None if the text is not a time."""
    value = clean_value(text)
    if value is None:
        return None
    exact = _SECONDS.search(value)
    if exact:
        return int(exact[1])
    match = _TIME.match(value)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def status_of(row: Mapping[str, str]) -> Optional[JobStatus]:
    """Return the status of the job of a row; None if the row names no job."""
    values = {
        key: next((clean_value(row[name]) for name in names if name in row), None)
        for key, names in _COLUMNS_BY_FIELD.items()
    }
    job_id = values["job_id"]
    if job_id is None or not _ID.fullmatch(job_id):
        return None
    raw = values["state"] or ""
    return JobStatus(
        job_id=job_id,
        state=state_of(raw),
        raw=raw,
        exit_code=parse_integer(values["exit_code"]),
        signal=parse_integer(values["signal"]) or None,  # 0 means that there was none
        code=parse_integer(values["code"]),
        reason=values["reason"] or "",
        group=values["group"] or "",
    )


def statuses_of(rows: Iterable[Mapping[str, str]]) -> Dict[str, JobStatus]:
    """Return job id → status; if a job has several rows, the last counts."""
    statuses = (status_of(row) for row in rows)
    return {status.job_id: status for status in statuses if status is not None}


def parse_integer(text: Optional[str]) -> Optional[int]:
    """Return the integer that a cell holds, if it holds one."""
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None
