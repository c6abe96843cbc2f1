"""Faults on request: what can go wrong with a real site, made to happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from fugaku_gpt.simulator.site import UNKNOWN_GROUP, Refusal

# code of a refusal → its words, as far as they are known
REFUSALS: Dict[int, str] = {
    54: "node=1 is less than the lower limit (385).",
    57: "elapse=18000 is greater than the upper limit (14400).",
    58: "rscgrp=none does not exist.",
    68: "The configuration has been changed. Retry.",
    71: f"Group not authorized to submit a job: group({UNKNOWN_GROUP})",
    72: "The number of jobs exceeds the accept limit (100).",
    76: "freq=2100 must be one of 2000,2200.",
    79: "Q01 group is not active (ACC->QUE).",
    90: "Job manager is not present.",
    91: "Internal error occurred.",
}
GARBAGE = "\x00\x1b[2J%%%pjstat: \ufffd truncat"


@dataclass
class Faults:
    """What is to go wrong next.

    Attributes:
        refuse_code, refuse_times: ``pjsub`` refuses so many scripts with this code.
        lose_times: so many jobs are accepted and then unknown.
        unanswered_times: so many jobs are accepted while ``pjsub`` says that it has failed.
        slow_seconds: every ``pjstat`` answers so late.
        fail_times: so many ``pjstat`` fail.
        garbage_times: so many ``pjstat`` print nonsense.
        node_down_times: so many jobs lose a node just after their start.
    """

    refuse_code: int = 71
    refuse_times: int = 0
    lose_times: int = 0
    unanswered_times: int = 0
    slow_seconds: float = 0.0
    fail_times: int = 0
    garbage_times: int = 0
    node_down_times: int = 0
    _names: Tuple[str, ...] = field(
        default=("refuse_times", "lose_times", "unanswered_times", "fail_times", "garbage_times", "node_down_times"),
        repr=False,
    )

    def _take(self, name: str) -> bool:
        """Whether the fault is due; once less from then on."""
        left = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return bool(left > 0)

    def refusal(self) -> Optional[Refusal]:
        """The refusal that is due, or None."""
        if not self._take("refuse_times"):
            return None
        return Refusal(self.refuse_code, REFUSALS.get(self.refuse_code, "Refused on request."))

    def loses_next(self) -> bool:
        return self._take("lose_times")

    def unanswered(self) -> bool:
        return self._take("unanswered_times")

    def fails(self) -> bool:
        return self._take("fail_times")

    def garbage(self) -> bool:
        return self._take("garbage_times")

    def node_goes_down(self) -> bool:
        return self._take("node_down_times")

    def summary(self) -> str:
        """What is pending, in words; empty for nothing."""
        parts = [f"{name[:-6].replace('_', '-')} {getattr(self, name)}" for name in self._names if getattr(self, name)]
        if self.slow_seconds:
            parts.append(f"slow-pjstat {self.slow_seconds:g}")
        return ", ".join(parts)
