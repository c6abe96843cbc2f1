"""Faults on request: failures that a real site can have, for tests of the programs that use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from fugaku_gpt.simulator.site import UNKNOWN_GROUP, Refusal

# code of a refusal → its text, as far as it is known
REFUSAL_TEXTS: Dict[int, str] = {
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
    """Faults that are pending; every count falls by one when its fault happens.

    Attributes:
        refuse_code: code with which ``pjsub`` refuses scripts.
        refuse_times: number of scripts that ``pjsub`` will refuse.
        lose_times: number of jobs that will be accepted and then be unknown.
        unanswered_times: number of jobs that will be accepted while ``pjsub`` reports a failure.
        slow_seconds: seconds by which every ``pjstat`` is delayed.
        fail_times: number of ``pjstat`` that will fail.
        garbage_times: number of ``pjstat`` that will print nonsense.
        node_down_times: number of jobs that will lose a node just after their start.
    """

    refuse_code: int = 71
    refuse_times: int = 0
    lose_times: int = 0
    unanswered_times: int = 0
    slow_seconds: float = 0.0
    fail_times: int = 0
    garbage_times: int = 0
    node_down_times: int = 0
    _counters: Tuple[str, ...] = field(
        default=("refuse_times", "lose_times", "unanswered_times", "fail_times", "garbage_times", "node_down_times"),
        repr=False,
    )

    def _consume(self, name: str) -> bool:
        """Whether a fault is pending; if so, its count falls by one."""
        remaining = getattr(self, name)
        if remaining > 0:
            setattr(self, name, remaining - 1)
        return bool(remaining > 0)

    def take_refusal(self) -> Optional[Refusal]:
        """The refusal of the next script, or None."""
        if not self._consume("refuse_times"):
            return None
        return Refusal(self.refuse_code, REFUSAL_TEXTS.get(self.refuse_code, "Refused on request."))

    def take_job_loss(self) -> bool:
        return self._consume("lose_times")

    def take_lost_answer(self) -> bool:
        return self._consume("unanswered_times")

    def take_pjstat_failure(self) -> bool:
        return self._consume("fail_times")

    def take_garbage_output(self) -> bool:
        return self._consume("garbage_times")

    def take_node_failure(self) -> bool:
        return self._consume("node_down_times")

    def summary(self) -> str:
        """The pending faults as text; empty if there are none."""
        pending_faults = [
            f"{name[:-6].replace('_', '-')} {getattr(self, name)}" for name in self._counters if getattr(self, name)
        ]
        if self.slow_seconds:
            pending_faults.append(f"slow-pjstat {self.slow_seconds:g}")
        return ", ".join(pending_faults)
