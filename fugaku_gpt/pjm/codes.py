"""PJM's job states and end codes, and how this program interprets them.

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

# what to do about a job that has failed
RESUME = "resume"  # submit it again: it continues from its checkpoint
RETRY = "retry"  # submit it again: the job itself was not at fault
NEVER = "never"  # it would end in the same way
WAIT = "wait"  # it has not ended

STATES: Dict[str, str] = {
    "ACC": QUEUED,
    "QUE": QUEUED,
    "RNA": QUEUED,  # resources are being acquired
    "RNP": RUNNING,  # prologue
    "RUN": RUNNING,
    "RNE": RUNNING,  # epilogue
    "RNO": RUNNING,  # ending
    "RSM": RUNNING,  # resuming
    "SPP": SUSPENDED,
    "SPD": SUSPENDED,
    "HLD": ON_HOLD,
    "ERR": ON_HOLD,  # stays until it is deleted
    "EXT": ENDED,  # normally, at a limit or by a failure: see the codes
    "CCL": CANCELLED,
    "RJT": REJECTED,
}


@dataclass(frozen=True)
class Ending:
    """The end of a job as its PJM code describes it.

    Attributes:
        code: PJM code.
        cause: the cause in a few words.
        advice: what to do about it; empty if there is nothing to do.
        retry: ``resume``, ``retry``, ``never`` or ``wait``.
    """

    code: int
    cause: str
    advice: str
    retry: str


_SUBMIT_OR_REPORT = "submit it again; if it recurs, report the job id to the support desk"

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
        Ending(20, "node down", "submit it again", RETRY),
        Ending(21, "shell could not be started", "check the script's #! line and that it can be read", NEVER),
        Ending(22, "interconnect failure (ICC)", "submit it again", RETRY),
        Ending(23, "killed for memory by the system", "less per node or per CMG: more nodes, other placement", NEVER),
        Ending(25, "failure of the high-availability service", "submit it again", RETRY),
        Ending(26, "prologue or epilogue failed", "submit it again; if it recurs, ask the support desk", RETRY),
        Ending(27, "exit of the resource management failed", _SUBMIT_OR_REPORT, RETRY),
        Ending(28, "job environment was not in order", "submit it again", RETRY),
        Ending(29, "no such job environment", "correct or drop -L jobenv=", NEVER),
        Ending(30, "could not be suspended or resumed", "submit it again", RETRY),
        Ending(100, "internal error of the job manager", _SUBMIT_OR_REPORT, RETRY),
        Ending(120, "internal error of the scheduler", _SUBMIT_OR_REPORT, RETRY),
        Ending(140, "internal error of the resource manager", _SUBMIT_OR_REPORT, RETRY),
        Ending(160, "internal error of the Tofu library", _SUBMIT_OR_REPORT, RETRY),
        Ending(180, "internal error of the tiered storage", "submit it again; a volume may have failed", RETRY),
    )
}

# text of REASON → PJM code that it belongs to; pjstat truncates it to 16 characters
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
    """Return the job state for PJM's state; ``unknown`` for a state that is not in the table."""
    return STATES.get(word.strip().upper(), UNKNOWN)


def ending_of(code: Optional[int], reason: str = "") -> Optional[Ending]:
    """Return the meaning of a PJM code, or of the reason if there is no code; None if neither is informative."""
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
    """Return the code that a REASON belongs to, even if it is truncated; None for an unknown reason."""
    text = reason.strip().upper()
    for full_reason, code in REASONS.items():
        if text == full_reason or (len(text) >= _REASON_WIDTH and full_reason.startswith(text)):
            return code
    return None
