"""Parsers of what PJM's commands print. Messages may be on any line: sites print text of their own around them.

No parser here raises, whatever the text; text that is not understood is left out of the result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from fugaku_gpt.pjm.catalogue import ERROR_MEANINGS, GATE_MEANINGS, SITE, UNNUMBERED_MEANINGS, ErrorMeaning
from fugaku_gpt.pjm.jobids import ID_PATTERN, MESSAGE_ID_PATTERN, PjmJobId, expand_job_ids, parse_job_id
from fugaku_gpt.pjm.limits import AclLimits, Limit, LimitUsage, parse_acl, parse_limit_usage
from fugaku_gpt.pjm.pjstat import (
    clean_value,
    parse_data,
    parse_seconds,
    parse_table,
    status_of,
    statuses_of,
)

__all__ = [
    "AclLimits",
    "Limit",
    "PjmMessage",
    "PjmJobId",
    "Refusal",
    "LimitUsage",
    "WaitResult",
    "clean_value",
    "expand_job_ids",
    "operation_results",
    "parse_data",
    "parse_acl",
    "parse_job_id",
    "parse_messages",
    "parse_table",
    "parse_limit_usage",
    "parse_wait_results",
    "first_refusal",
    "parse_refusals",
    "parse_seconds",
    "status_of",
    "statuses_of",
    "submitted_ids",
]

ERROR = "ERR"
WARNING = "WARN"
INFO = "INFO"
_LINE_LENGTH = 4096  # characters of a line that are parsed
_MESSAGE = re.compile(r"\[[ ]?(INFO|WARN|ERR)\.?[ ]?\][ \t]+PJM[ \t]+(\d{4})[ \t]*(?:(p[jl]\w{1,20})[ \t]+)?(.*)")
_SUBMITTED = re.compile(rf"\b[Jj]ob[ \t]+({ID_PATTERN})[ \t]+submitted")
_BARE_IDS = re.compile(rf"{ID_PATTERN}(?:[ \t,]+{ID_PATTERN})*")
_ID = re.compile(rf"{ID_PATTERN}(?![\d\[_])")
_JOB_ID_IN_TEXT = re.compile(rf"\b[Jj]ob[ \t]+\"?({MESSAGE_ID_PATTERN})\"?(?![\w\[])")
_WAIT_ROW = re.compile(
    rf"[ \t]*({ID_PATTERN})[ \t]+(-?\d{{1,9}}|[XEH-])[ \t]+(-?\d{{1,9}}|[XEH-])[ \t]+(-?\d{{1,9}}|[XEH-])[ \t]*"
)
_ACCEPTED = ("0100", "0119")


@dataclass(frozen=True)
class PjmMessage:
    """One numbered message of a PJM command.

    Attributes:
        level: ``INFO``, ``WARN`` or ``ERR``.
        code: four digits.
        command: such as ``pjsub``; empty if the message names none.
        text: the rest of the line.
    """

    level: str
    code: str
    command: str
    text: str


@dataclass(frozen=True)
class Refusal:
    """The reason why a command was refused.

    Attributes:
        code: four digits; empty for a message without a number.
        text: PJM's own words.
        meaning: the error in plain words.
        remedy: ``user`` (change the script or command), ``site`` (right, budget or setting) or ``retry`` (later).
        advice: how to remedy it.
    """

    code: str
    text: str
    meaning: str
    remedy: str
    advice: str


@dataclass(frozen=True)
class WaitResult:
    """A line of ``pjwait``.

    Attributes:
        code, exit_code, signal: PJM code, and exit code and signal of the script; None if the job has not ended.
        mark: ``X`` still active, ``E`` error, ``H`` held, ``-`` parent of sub-jobs; empty for an ended job.
    """

    job_id: str
    code: Optional[int]
    exit_code: Optional[int]
    signal: Optional[int]
    mark: str = ""


def _lines(text: str) -> List[str]:
    return [line.rstrip("\r")[:_LINE_LENGTH] for line in text.split("\n")]


def parse_messages(text: str) -> List[PjmMessage]:
    """Return the numbered messages in ``text``, in order."""
    messages = []
    for line in _lines(text):
        match = _MESSAGE.search(line) if "[" in line else None
        if match:
            messages.append(PjmMessage(match[1], match[2], match[3] or "", match[4].strip()))
    return messages


def submitted_ids(text: str) -> List[str]:
    """Return the ids of the jobs that ``pjsub`` accepted, also from ``pjsub -z jid``, which prints bare ids."""
    ids = [
        match[1]
        for message in parse_messages(text)
        if message.level == INFO and message.code == "0000"
        for match in [_SUBMITTED.search(message.text)]
        if match
    ]
    if ids:
        return ids
    for line in _lines(text):
        if _BARE_IDS.fullmatch(line.strip()):
            ids += _ID.findall(line)
    return ids


def parse_refusals(text: str) -> List[Refusal]:
    """Return the reasons of a refusal, each once and in order; empty if ``text`` holds no error."""
    refusals: List[Refusal] = []
    for line in _lines(text):
        message = _MESSAGE.search(line) if "[" in line else None
        if message and message[1] == ERROR:
            refusals.append(_numbered_refusal(message[2], message[4].strip()))
        elif not message:
            lower = line.lower()
            refusals += [
                _refusal_with("", line.strip(), meaning) for phrase, meaning in UNNUMBERED_MEANINGS if phrase in lower
            ][:1]
    return list(dict.fromkeys(refusals))


def first_refusal(text: str) -> Optional[Refusal]:
    """Return the first of :func:`parse_refusals`, numbered ones first; None if there is none."""
    refusals = parse_refusals(text)
    numbered = [refusal for refusal in refusals if refusal.code]
    return next(iter(numbered or refusals), None)


def _numbered_refusal(code: str, text: str) -> Refusal:
    if code == "0079":
        lower = text.lower()
        for phrase, meaning in GATE_MEANINGS:
            if phrase in lower:
                return _refusal_with(code, text, meaning)
    unknown = ErrorMeaning("an error that this program does not know", SITE, "see the site's manual for this number")
    return _refusal_with(code, text, ERROR_MEANINGS.get(code, unknown))


def _refusal_with(code: str, text: str, meaning: ErrorMeaning) -> Refusal:
    return Refusal(code, text, meaning.meaning, meaning.remedy, meaning.advice)


def operation_results(text: str) -> Dict[str, str]:
    """Return the results of ``pjdel``, ``pjhold`` or ``pjrls``: job id as printed → "" if accepted, else the reason.

    A range such as ``239[0-2]`` is expanded to single ids. An accepted id stays accepted: a second request for the
    sub-jobs of a step job may complain about those that have ended in the meantime.
    """
    results: Dict[str, str] = {}
    for message in parse_messages(text):
        if message.level == WARNING:
            continue
        match = _JOB_ID_IN_TEXT.search(message.text)
        if not match:
            continue
        # 01xx are pjdel's numbers; pjhold and pjrls have numbers of their own, and also print INFO on success
        accepted = message.level == INFO and (message.code in _ACCEPTED or "ccepted" in message.text)
        if not accepted and message.level == INFO:
            continue
        for job_id in _single_ids(match[1]):
            if results.get(job_id) != "":
                results[job_id] = "" if accepted else message.text
    return results


def _single_ids(text: str) -> Tuple[str, ...]:
    try:
        return tuple(str(job_id) for job_id in expand_job_ids(text))
    except ValueError:  # a range from high to low: keep it as written
        return (text,)


def parse_wait_results(text: str) -> List[WaitResult]:
    """Parse the lines of ``pjwait``."""
    results = []
    for line in _lines(text):
        match = _WAIT_ROW.fullmatch(line)
        if match:
            mark = next((cell for cell in match.groups()[1:] if cell in "XEH-"), "")
            numbers = [None if cell in "XEH-" else int(cell) for cell in match.groups()[1:]]
            results.append(WaitResult(match[1], numbers[0], numbers[1], numbers[2], mark))
    return results
