"""Finds the rank that has left the common path, from the calls that ranks made before they came to wait.

A rank's calls fall into stretches: those of one step, phase and micro-batch. The members of a communicator make the
same collectives on it in the same stretch; and a rank makes in each step the calls that it made in the same stretch of
earlier steps. A rank that differs from most others, or from its own past, is the cause.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.records.flight import BACKWARD, CHECKPOINT, Flight, RecordedCall

LEFT_OUT, EXTRA_CALL, ORDER, DISAGREE = "left out", "one more", "order", "disagree"
_MAX_RANKS = 64  # number of ranks that are compared: more witnesses add nothing
_NEVER = -1
_MORE_THAN_CALLS = 1 << 32  # calls that are recorded of a stretch are fewer

Stretch = Tuple[int, int, int]  # step, phase, micro-batch
CallSignature = Tuple[object, ...]  # what must agree between ranks


@dataclass(frozen=True)
class Deviation:
    """The call at which ranks began to differ.

    Attributes:
        kind: ``left out``, ``one more``, ``order`` or ``disagree``.
        call: the call as it was due; for ``one more``, as it was made.
        actual: the call that the culprits made instead.
        witnesses: ranks that made the calls as due.
        alternatives: the other ranks, if it cannot be decided which of the two sides is the culprit.
    """

    culprits: Tuple[int, ...]
    kind: str
    call: RecordedCall
    actual: Optional[RecordedCall]
    witnesses: Tuple[int, ...]
    alternatives: Tuple[int, ...] = ()


class _CallHistory:
    """One rank's calls on some communicators, by stretch, in order."""

    def __init__(self, flight: Flight, calls: Sequence[RecordedCall]) -> None:
        self.rank = flight.rank
        self.stretches: Dict[Stretch, List[RecordedCall]] = {}
        for call in calls:
            self.stretches.setdefault((call.step, call.phase, call.micro_batch), []).append(call)
        head = flight.head
        self.current_stretch: Stretch = (head.step, head.phase, head.micro_batch)  # not ended yet

    def signatures(self, stretch: Stretch) -> Tuple[CallSignature, ...]:
        """Signatures of the calls made in a stretch."""
        return tuple(_signature(call) for call in self.stretches.get(stretch, ()))


def find_deviation(flights: Mapping[int, Flight], involved: Sequence[int], names: Sequence[str]) -> Optional[Deviation]:
    """Find the first call by which a rank differs from other ranks, or from its own earlier steps; None if all agree.

    Args:
        flights: rank → flight record.
        involved: ranks that wait for each other.
        names: the communicators in which they wait.
    """
    deviations = []
    seen = set()
    for rank in involved:
        for group_index, group in enumerate(flights[rank].groups if rank in flights else ()):
            key = (group.name, group.members, group.number)
            if len(group.members) > 1 and key not in seen:
                seen.add(key)
                difference = _between_members(flights, rank, group_index)
                if difference is not None:
                    deviations.append(difference)
    if deviations:  # what came first is the cause of the rest
        return min(deviations, key=lambda deviation: (deviation.call.step, deviation.call.entered))
    return _against_own_past(flights, involved, names)


def _between_members(flights: Mapping[int, Flight], rank: int, group_index: int) -> Optional[Deviation]:
    """Compare the members of one communicator, which must make the same collectives on it."""
    group = flights[rank].groups[group_index]
    members = [rank, *(member for member in group.members if member != rank and member in flights)][:_MAX_RANKS]
    calls_of_member: Dict[int, List[RecordedCall]] = {}
    for member in members:
        for other_index, other_group in enumerate(flights[member].groups):
            if (other_group.name, other_group.members, other_group.number) == (group.name, group.members, group.number):
                calls_of_member[member] = [
                    call for call in flights[member].calls if call.group == other_index and not call.is_message
                ]
    if not any(calls_of_member.values()) or len(calls_of_member) < 2:
        return None
    # older calls of some members are no longer recorded: begin at the first call that all have recorded
    first = max((calls[0].sequence for calls in calls_of_member.values() if calls), default=1)
    histories = [
        _CallHistory(flights[member], [call for call in calls if call.sequence >= first])
        for member, calls in calls_of_member.items()
    ]
    for stretch in _ordered_stretches(histories):
        sides = _group_by_calls(histories, stretch)
        if len(sides) > 1:
            return _blame_side(flights, group.name, histories, stretch, sides)
    return None


def _ordered_stretches(histories: Sequence[_CallHistory]) -> List[Stretch]:
    """All stretches, in the order in which ranks reached them."""
    order: Dict[Stretch, int] = {}
    for history in histories:
        for number, stretch in enumerate(history.stretches):
            order[stretch] = max(order.get(stretch, 0), number)
    return sorted(order, key=lambda stretch: (stretch[0], order[stretch]))


def _has_passed(history: _CallHistory, stretch: Stretch) -> bool:
    """True if the rank is past a stretch, so that its calls in it are complete."""
    if history.current_stretch == stretch:
        return False
    if stretch in history.stretches:
        return True
    # within a step, forward and backward passes come in an order of their own, then the other phases as numbered
    later = max(history.current_stretch[1], BACKWARD) > max(stretch[1], BACKWARD)
    return stretch[0] < history.current_stretch[0] or (stretch[0] == history.current_stretch[0] and later)


def _group_by_calls(
    histories: Sequence[_CallHistory], stretch: Stretch
) -> Dict[Tuple[CallSignature, ...], List[_CallHistory]]:
    """Group ranks by their calls in a stretch; a rank that is still in it joins a group that began with its calls."""
    sides: Dict[Tuple[CallSignature, ...], List[_CallHistory]] = {}
    unfinished = []
    for history in histories:
        if _has_passed(history, stretch):
            sides.setdefault(history.signatures(stretch), []).append(history)
        elif history.current_stretch == stretch or stretch in history.stretches:
            unfinished.append(history)
    for history in sorted(unfinished, key=lambda candidate: -len(candidate.signatures(stretch))):
        made = history.signatures(stretch)
        if not made:
            continue  # no call yet
        matching_sides = [side for side in sides if side[: len(made)] == made]
        if matching_sides:
            sides[max(matching_sides, key=len)].append(history)
        else:
            sides.setdefault(made, []).append(history)
    return sides


def _blame_side(
    flights: Mapping[int, Flight],
    name: str,
    histories: Sequence[_CallHistory],
    stretch: Stretch,
    sides: Mapping[Tuple[CallSignature, ...], List[_CallHistory]],
) -> Deviation:
    """Blame the minority; in a tie, the side whose calls have no example in other groups and earlier steps."""
    most = max(len(side) for side in sides.values())
    support = {signatures: len(side) for signatures, side in sides.items()}
    undecided = False
    if sum(len(side) == most for side in sides.values()) > 1:
        examples = _examples(flights, name, [history.rank for history in histories], stretch)
        support = {
            signatures: sum(
                count for seen, count in examples.items() if _is_example_of(signatures, seen, side, stretch)
            )
            for signatures, side in sides.items()
        }
        best = max(support.values())
        if sum(count == best for count in support.values()) > 1:
            undecided = True  # of equally many, the one that did less is named: to forget is more common than to repeat
            support = {signatures: len(side) * _MORE_THAN_CALLS + len(signatures) for signatures, side in sides.items()}
    right = max(support, key=lambda signatures: support[signatures])
    # another side than the right one, also where all have the same support
    wrong = min((signatures for signatures in support if signatures != right), key=lambda other: support[other])
    good, bad = sides[right], sides[wrong]
    alternatives = tuple(sorted(history.rank for history in good)) if undecided else ()
    return _first_difference(good, bad, stretch, alternatives)


def _is_example_of(
    signatures: Tuple[CallSignature, ...],
    seen: Tuple[CallSignature, ...],
    side: Sequence[_CallHistory],
    stretch: Stretch,
) -> bool:
    return signatures == seen or (
        all(not _has_passed(history, stretch) for history in side) and seen[: len(signatures)] == signatures
    )


def _first_difference(
    good: Sequence[_CallHistory], bad: Sequence[_CallHistory], stretch: Stretch, alternatives: Tuple[int, ...]
) -> Deviation:
    """Describe the first call in which the two sides differ."""
    culprits, witnesses = (tuple(sorted(history.rank for history in side)) for side in (bad, good))
    due = max((history.stretches.get(stretch, []) for history in good), key=len)
    made = max((history.stretches.get(stretch, []) for history in bad), key=len)
    index = next(
        (n for n, (a, b) in enumerate(zip(due, made)) if _signature(a) != _signature(b)), min(len(due), len(made))
    )
    if index == len(due) or _start_alike(due[index:], made[index + 1 :]):
        return Deviation(culprits, EXTRA_CALL, made[index], None, witnesses, alternatives)
    if index == len(made) or _start_alike(made[index:], due[index + 1 :]):
        return Deviation(culprits, LEFT_OUT, due[index], None, witnesses, alternatives)
    return Deviation(culprits, DISAGREE, due[index], made[index], witnesses, alternatives)


def _start_alike(calls: Sequence[RecordedCall], other_calls: Sequence[RecordedCall]) -> bool:
    """True if both lists are equal as far as the shorter one goes, and neither is empty."""
    pairs = list(zip(map(_signature, calls), map(_signature, other_calls)))
    return bool(pairs) and all(ours == theirs for ours, theirs in pairs)


def _examples(
    flights: Mapping[int, Flight], name: str, ranks: Sequence[int], stretch: Stretch
) -> "Counter[Tuple[CallSignature, ...]]":
    """Count the call sequences of the same stretch in earlier steps, and in other groups of the same name."""
    seen: Counter[Tuple[CallSignature, ...]] = Counter()
    examined = [*ranks, *(rank for rank in flights if rank not in ranks)][:_MAX_RANKS]
    for rank in examined:
        history = _complete_steps(flights[rank], (name,), messages=False)
        steps = {call.step for call in flights[rank].calls[1:]} - {_cut_step(flights[rank])}
        for step in sorted(steps):
            if step < stretch[0] or (step == stretch[0] and rank not in ranks):
                earlier_stretch = (step, stretch[1], stretch[2])
                if _has_passed(history, earlier_stretch):
                    seen[history.signatures(earlier_stretch)] += 1
    return seen


def _complete_steps(flight: Flight, names: Sequence[str], messages: bool) -> _CallHistory:
    """A rank's calls on the named communicators, without the step whose beginning is no longer recorded."""
    calls = flight.calls
    cut = _cut_step(flight)
    recorded = [call for call in calls if call.communicator in names and call.step > cut]
    return _CallHistory(flight, [call for call in recorded if messages or not call.is_message])


def _cut_step(flight: Flight) -> int:
    """The last step whose beginning is no longer recorded."""
    calls = flight.calls
    return calls[0].step if calls and calls[0].ordinal > 1 else _NEVER - 1


def _against_own_past(
    flights: Mapping[int, Flight], involved: Sequence[int], names: Sequence[str]
) -> Optional[Deviation]:
    """Compare each rank's calls on all of the named communicators with those of its own earlier steps."""
    strays = []
    for rank in involved:
        if rank not in flights:
            continue
        history = _complete_steps(flights[rank], names, messages=True)
        stray = _first_stray(history)
        if stray is not None:
            strays.append((rank, *stray))
    if not strays or len(strays) == len(involved) > 1:
        return None
    rank, due, actual = strays[0]
    witnesses = tuple(other for other in involved if other != rank)
    if due is None:
        assert actual is not None
        return Deviation((rank,), EXTRA_CALL, actual, None, witnesses)
    if actual is None:
        return Deviation((rank,), LEFT_OUT, due, None, witnesses)
    return Deviation((rank,), ORDER, due, actual, witnesses)


def _first_stray(history: _CallHistory) -> Optional[Tuple[Optional[RecordedCall], Optional[RecordedCall]]]:
    """Return (call due, call made) for the first call of the last step that differs from every earlier step. A save of
    a checkpoint is spread over steps, which differ for that."""
    for stretch in [candidate for candidate in history.stretches if candidate[0] == history.current_stretch[0]]:
        if stretch[1] == CHECKPOINT:
            continue
        made = history.stretches[stretch]
        signatures = history.signatures(stretch)
        earlier = [calls for other, calls in history.stretches.items() if other[1:] == stretch[1:] and other < stretch]
        if not earlier:
            continue
        if not _has_passed(history, stretch):
            if any(tuple(map(_signature, calls))[: len(signatures)] == signatures for calls in earlier):
                continue
        elif any(tuple(map(_signature, calls)) == signatures for calls in earlier):
            continue
        before = earlier[-1]
        index = next(
            (n for n, (a, b) in enumerate(zip(before, made)) if _signature(a) != _signature(b)),
            min(len(before), len(made)),
        )
        return (
            _as_due_in(before[index], stretch[0]) if index < len(before) else None,
            made[index] if index < len(made) else None,
        )
    return None


def _as_due_in(call: RecordedCall, step: int) -> RecordedCall:
    """A call of an earlier step as due in this one."""
    return replace(call, step=step, sequence=0)


def _signature(call: RecordedCall) -> CallSignature:
    return call.site, call.operation, call.communicator, call.dtype, call.shape, call.peer
