"""What PJM's states and end codes mean for us.

Sources: Command Reference J2UL-2549 (pjstat, pjstatsinfo), Fugaku user guide, "Checking when a job ends abnormally".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional

from fugaku_gpt.records.job import (
    CANCELLED,
    ENDED,
    ON_HOLD,
    QUEUED,
    REJECTED,
    RUNNING,
    SUSPENDED,
    UNKNOWN,
)

# what to do about a job that has ended badly
RESUME = "resume"  # hand it in again: it goes on from its checkpoint
RETRY = "retry"  # hand it in again: nothing of its own was wrong
NEVER = "never"  # it would end the same way
WAIT = "wait"  # it has not ended

STATES: Dict[str, str] = {
    "ACC": QUEUED,
    "QUE": QUEUED,
    "RNA": QUEUED,  # resources are being taken
    "RNP": RUNNING,  # prologue
    "RUN": RUNNING,
    "RNE": RUNNING,  # epilogue
    "RNO": RUNNING,  # ending
    "RSM": RUNNING,  # resuming
    "SPP": SUSPENDED,
    "SPD": SUSPENDED,
    "HLD": ON_HOLD,
    "ERR": ON_HOLD,  # stays until it is deleted
    "EXT": ENDED,  # by itself, by a limit or by a failure: the codes tell
    "CCL": CANCELLED,
    "RJT": REJECTED,
}


@dataclass(frozen=True)
class Ending:
    """What a PJM code tells.

    Attributes:
        code: PJM code.
        cause: a few words.
        advice: what to do about it; empty where nothing.
        retry: ``resume``, ``retry``, ``never`` or ``wait``.
    """

    code: int
    cause: str
    advice: str
    retry: str


_SUBMIT_OR_REPORT = "hand it in again; if it comes back, tell the support desk with the job id"

ENDINGS: Dict[int, Ending] = {
    ending.code: ending
    for ending in (
        Ending(0, "ended by itself", "", NEVER),
        Ending(1, "deleted with pjdel", "", NEVER),
        Ending(2, "rejected on acceptance", "see what pjsub said", NEVER),
        Ending(3, "refused by the site's gate", "see the reason: group, user or budget", NEVER),
        Ending(4, "held with pjhold", "release it with pjrls", WAIT),
        Ending(
            6, "cancelled by a step's condition", "an earlier step has ended so that this one was not to run", NEVER
        ),
        Ending(7, "ended for a deadline of the site", "resume it after the deadline", RESUME),
        Ending(8, "cancelled by the site's gate", "see the reason: group, user or budget", NEVER),
        Ending(9, "interrupted, and not to be run again by PJM", "resume it", RESUME),
        Ending(11, "time limit reached", "resume it from its checkpoint, or ask for more time", RESUME),
        Ending(12, "memory limit exceeded", "less per node: more nodes, more TP or PP, recompute, ZeRO", NEVER),
        Ending(13, "disk limit exceeded", "ask for more temporary space, or write less", NEVER),
        Ending(14, "waiting for its bulk job", "", WAIT),
        Ending(
            16, "directory or output files out of reach", "name the volumes in PJM_LLIO_GFSCACHE; check -o, -e", NEVER
        ),
        Ending(18, "ended past its minimum time, for another job", "resume it", RESUME),
        Ending(20, "node down", "hand it in again", RETRY),
        Ending(21, "shell could not be started", "check the script's #! line and that it can be read", NEVER),
        Ending(22, "interconnect failure (ICC)", "hand it in again", RETRY),
        Ending(23, "killed for memory by the system", "less per node or per CMG: more nodes, other placement", NEVER),
        Ending(25, "failure of the high-availability service", "hand it in again", RETRY),
        Ending(26, "prologue or epilogue failed", "hand it in again; if it comes back, tell the support desk", RETRY),
        Ending(27, "exit of the resource management failed", _SUBMIT_OR_REPORT, RETRY),
        Ending(28, "job environment was not in order", "hand it in again", RETRY),
        Ending(29, "no such job environment", "correct or drop -L jobenv=", NEVER),
        Ending(30, "could not be suspended or resumed", "hand it in again", RETRY),
        Ending(100, "internal error of the job manager", _SUBMIT_OR_REPORT, RETRY),
        Ending(120, "internal error of the scheduler", _SUBMIT_OR_REPORT, RETRY),
        Ending(140, "internal error of the resource manager", _SUBMIT_OR_REPORT, RETRY),
        Ending(160, "internal error of the Tofu library", _SUBMIT_OR_REPORT, RETRY),
        Ending(180, "internal error of the tiered storage", "hand it in again; a volume may have failed", RETRY),
    )
}

# words of REASON → PJM code that they belong to; pjstat cuts them to 16 characters
REASONS: Dict[str, int] = {
    "ELAPSE LIMIT EXCEEDED": 11,
    "LIMIT OVER MEMORY": 12,
    "NO CURRENT DIR": 16,
    "FILE IO ERROR": 16,
    "ANOTHER JOB STARTED": 18,
    "DEADLINE SCHEDULE STARTED": 18,
    "GATE CHECK": 8,
}
_REASON_WIDTH = 16


def state_of(word: str) -> str:
    """Our state for PJM's word; ``unknown`` for a word that is not known."""
    return STATES.get(word.strip().upper(), UNKNOWN)


def ending_of(code: Optional[int], reason: str = "") -> Optional[Ending]:
    """What a PJM code means; without a code, what the reason means; None where neither says anything."""
    if code is None:
        code = code_of_reason(reason)
        if code is None:
            return None
    if code in ENDINGS:
        return ENDINGS[code]
    if 100 <= code < 200:
        return Ending(code, f"internal error {code} of the job operation software", _SUBMIT_OR_REPORT, RETRY)
    return Ending(code, f"PJM code {code}, which this program does not know", "see the site's list of PJM codes", NEVER)


def code_of_reason(reason: str) -> Optional[int]:
    """The code that a REASON belongs to, also when it is cut short; None where it is not a known one."""
    text = reason.strip().upper()
    for full_reason, code in REASONS.items():
        if text == full_reason or (len(text) >= _REASON_WIDTH and full_reason.startswith(text)):
            return code
    return None
