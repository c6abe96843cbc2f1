"""Compares a rank's calls while a checkpoint is saved with those that ranks make then.

A save is spread over steps: it begins in one, and in a later one, when all ranks have written, rank 0 gathers their
reports. So a step has none, one or some of the exchanges of ``layout.communications``, each whole, in any order.
"""

from __future__ import annotations

from typing import List, Mapping, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.hang.history import DISAGREE, LEFT_OUT, ORDER, Deviation
from fugaku_gpt.layout.communications import ANY_SIZE, CHECKPOINT_EXCHANGES, Collective
from fugaku_gpt.layout.operations import BARRIER
from fugaku_gpt.records.flight import CHECKPOINT, FINISHED, Flight, RecordedCall

UNKNOWN_LINE = "an unknown line"


class _Expected(NamedTuple):
    """A call that may come next: the one at this offset of an exchange."""

    exchange: Tuple[Collective, ...]
    offset: int

    @property
    def due(self) -> Collective:
        return self.exchange[self.offset]


def checkpoint_deviation(flights: Mapping[int, Flight], rank: int, step: int) -> Optional[Deviation]:
    """The first call by which a rank left the plan of a checkpoint after a step; None if it has kept to it."""
    flight = flights[rank]
    calls = _calls_of(flight, step)
    expected = _at_the_beginning()
    for number, call in enumerate(calls):
        following = [candidate for candidate in expected if _is_made_by(candidate.due, call)]
        if not following:
            due = _due_call(flights, rank, step, number, expected)
            kind = DISAGREE if due.operation == call.operation and expected[0].offset > 0 else ORDER
            return Deviation((rank,), kind, due, call, ())
        expected = _after(following)
    has_passed = flight.head.step > step or flight.head.phase == FINISHED
    if has_passed and all(candidate.offset > 0 for candidate in expected):
        return Deviation((rank,), LEFT_OUT, _due_call(flights, rank, step, len(calls), expected), None, ())
    return None


def _calls_of(flight: Flight, step: int) -> List[RecordedCall]:
    return [
        call
        for call in flight.calls
        if (call.step, call.phase, call.communicator) == (step, CHECKPOINT, "world") and not call.is_message
    ]


def _at_the_beginning() -> List[_Expected]:
    return [_Expected(exchange, 0) for exchange in CHECKPOINT_EXCHANGES]


def _after(made: Sequence[_Expected]) -> List[_Expected]:
    """The calls that may follow those just made, of which one is the rank's."""
    following = [_Expected(exchange, offset + 1) for exchange, offset in made if offset + 1 < len(exchange)]
    return following + (_at_the_beginning() if len(following) < len(made) else [])


def _is_made_by(due: Collective, call: RecordedCall) -> bool:
    elements = 0 if call.operation == BARRIER else 1
    for size in call.shape:
        elements *= size
    return call.operation == due.operation and due.elements in (ANY_SIZE, elements)


def _due_call(
    flights: Mapping[int, Flight], rank: int, step: int, number: int, expected: Sequence[_Expected]
) -> RecordedCall:
    """A call that was due, with its line of code if another rank has recorded it."""
    for other, flight in flights.items():
        calls = _calls_of(flight, step) if other != rank else []
        if number < len(calls) and any(_is_made_by(candidate.due, calls[number]) for candidate in expected):
            return calls[number]
    due = expected[0].due
    shape = (due.elements,) if due.elements > 0 else ()
    return RecordedCall(
        0, 0, 0, "world", due.operation, "", shape, -1, UNKNOWN_LINE, "", step, -1, CHECKPOINT, 0, 0.0, 0.0, 0.0
    )
