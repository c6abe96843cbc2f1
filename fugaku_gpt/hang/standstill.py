"""Tells a run that hangs from one that was ended while its ranks made progress: an accusation needs evidence.

At any moment of a healthy run some rank waits for another, so the records of a run that was killed look as those of a
hang do, but for time: nobody had waited for long. A standstill is the time for which no rank made progress although
their watchdogs, or their processes, still lived.
"""

from __future__ import annotations

from typing import Collection, List, NamedTuple, Sequence

from fugaku_gpt.records.flight import CHECKPOINT, START_UP, Flight, Head

# Ranks that are asked to end may do so one after the other, and the last of them is killed ten seconds after the first.
_LEAST_SECONDS = 15.0
_PAUSES = 3.0  # a hang is as many times as long as the longest pause that the ranks have recorded
# number of timeouts of the watchdog that a rank may be idle in these phases: files may be slow
PATIENCE_BY_PHASE = {START_UP: 5, CHECKPOINT: 5}
_USUAL_TIMEOUT = 1800.0  # seconds; of a run that has no watchdog
_LONGEST_TICK_SECONDS = 20.0  # between two looks of a watchdog that waits for a file server


class Standstill(NamedTuple):
    """For how long no rank made progress.

    Attributes:
        seconds: from the last progress to the last sign of life, of the rank for which that is least.
        limit: seconds from which on that is a hang.
        moved: time of the last progress of any rank, seconds since the epoch.
        is_timed: whether anything says how long it was: a watchdog, or a living process.
    """

    seconds: float
    limit: float
    moved: float
    is_timed: bool

    @property
    def is_hang(self) -> bool:
        """True if the ranks stood still for longer than a healthy run does."""
        return self.is_timed and self.seconds >= self.limit


def measure_standstill(flights: Sequence[Flight], living: Collection[int], moment: float) -> Standstill:
    """Measure for how long no rank made progress.

    Ranks whose watchdog fell silent before those of the others do not count: they may be what the others wait for.

    Args:
        flights: not empty.
        living: ranks whose processes live on this machine, and are not stopped.
        moment: the present time, seconds since the epoch.
    """
    heads = [flight.head for flight in flights]
    moved = max(head.progressed for head in heads)
    newest = max(moment if head.rank in living else head.watched for head in heads)
    witnesses = [head for head in heads if head.rank in living or (head.watched and not _is_silent(head, newest))]
    if not witnesses:
        return Standstill(0.0, _LEAST_SECONDS, moved, False)
    pause = longest_pause(flights)
    spans = [(_last_sign(head, living, moment) - head.progressed, _limit(head, pause)) for head in witnesses]
    seconds, limit = min(spans, key=lambda span: span[0] - span[1])
    return Standstill(max(0.0, seconds), limit, moved, True)


def longest_pause(flights: Sequence[Flight]) -> float:
    """The longest time in seconds between two recorded events of one rank, after start-up: a call that began or
    ended."""
    longest = 0.0
    for flight in flights:
        events: List[float] = []
        for call in flight.calls:
            if call.phase != START_UP:
                events += [moment for moment in (call.entered, call.left) if moment]
        events.sort()
        longest = max([longest, *(later - earlier for earlier, later in zip(events, events[1:]))])
    return longest


def _last_sign(head: Head, living: Collection[int], moment: float) -> float:
    return moment if head.rank in living else max(head.watched, head.progressed)


def _limit(head: Head, pause: float) -> float:
    timeout = head.timeout or _USUAL_TIMEOUT
    patience = PATIENCE_BY_PHASE.get(head.phase)
    if patience is not None:
        return timeout * patience
    return min(timeout, max(_LEAST_SECONDS, _PAUSES * pause))


def _is_silent(head: Head, newest: float) -> bool:
    return newest - head.watched > max(1.0, min(head.timeout / 2, _LONGEST_TICK_SECONDS))
