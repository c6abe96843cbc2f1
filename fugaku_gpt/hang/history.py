"""Which rank has left the common path, told from what the ranks did before they came to wait.

A rank's calls fall into stretches: those of one step, phase and micro-batch. The members of a communicator make the
same collectives on it in the same stretch; and a rank does in each step what it did in the same stretch of the steps
before. Who differs from most others, or from its own past, is the cause.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.records.flight import BACKWARD, Call, Flight

LEFT_OUT, ONE_MORE, ORDER, DISAGREE = "left out", "one more", "order", "disagree"
_MOST_RANKS = 64  # that are looked at: beyond, more witnesses say nothing new
_NEVER = -1

Stretch = Tuple[int, int, int]  # step, phase, micro-batch
Value = Tuple[object, ...]  # what must agree between ranks


@dataclass(frozen=True)
class Deviation:
    """Where ranks parted.

    Attributes:
        kind: ``left out``, ``one more``, ``order`` or ``disagree``.
        call: as it was due; for ``one more``, as it was made.
        actual: what the culprits made in its place.
        witnesses: ranks that kept to the path.
        others: the other side, where nothing tells which of the two has left it.
    """

    culprits: Tuple[int, ...]
    kind: str
    call: Call
    actual: Optional[Call]
    witnesses: Tuple[int, ...]
    others: Tuple[int, ...] = ()


class _Path:
    """One rank's calls on some communicators, by stretch, in order."""

    def __init__(self, flight: Flight, calls: Sequence[Call]) -> None:
        self.rank = flight.rank
        self.stretches: Dict[Stretch, List[Call]] = {}
        for call in calls:
            self.stretches.setdefault((call.step, call.phase, call.micro_batch), []).append(call)
        head = flight.head
        self.now: Stretch = (head.step, head.phase, head.micro_batch)  # not ended yet

    def values(self, stretch: Stretch) -> Tuple[Value, ...]:
        """What it did in a stretch."""
        return tuple(_value(call) for call in self.stretches.get(stretch, ()))


def deviation(flights: Mapping[int, Flight], involved: Sequence[int], names: Sequence[str]) -> Optional[Deviation]:
    """The first place where one of the ranks does what others, or itself in earlier steps, did not; None if all agree.

    Args:
        flights: by rank.
        involved: ranks that wait for each other.
        names: the communicators in which they wait.
    """
    found = []
    seen = set()
    for rank in involved:
        for place, group in enumerate(flights[rank].groups if rank in flights else ()):
            key = (group.name, group.members, group.number)
            if len(group.members) > 1 and key not in seen:
                seen.add(key)
                parted = _between_members(flights, rank, place)
                if parted is not None:
                    found.append(parted)
    if found:  # what came first is the cause of the rest
        return min(found, key=lambda one: (one.call.step, one.call.entered))
    return _against_own_past(flights, involved, names)


def _between_members(flights: Mapping[int, Flight], rank: int, place: int) -> Optional[Deviation]:
    """Members of one communicator must make the same collectives on it."""
    group = flights[rank].groups[place]
    near = [rank, *(member for member in group.members if member != rank and member in flights)][:_MOST_RANKS]
    found: Dict[int, List[Call]] = {}
    for member in near:
        for index, theirs in enumerate(flights[member].groups):
            if (theirs.name, theirs.members, theirs.number) == (group.name, group.members, group.number):
                found[member] = [call for call in flights[member].calls if call.group == index and not call.is_message]
    if not any(found.values()) or len(found) < 2:
        return None
    # older calls of some members are not known any more: begin where all are known
    first = max((calls[0].sequence for calls in found.values() if calls), default=1)
    paths = [
        _Path(flights[member], [call for call in calls if call.sequence >= first]) for member, calls in found.items()
    ]
    for stretch in _in_order(paths):
        sides = _sides(paths, stretch)
        if len(sides) > 1:
            return _judge(flights, group.name, paths, stretch, sides)
    return None


def _in_order(paths: Sequence[_Path]) -> List[Stretch]:
    """All stretches, in the order in which ranks came to them."""
    order: Dict[Stretch, int] = {}
    for path in paths:
        for number, stretch in enumerate(path.stretches):
            order[stretch] = max(order.get(stretch, 0), number)
    return sorted(order, key=lambda stretch: (stretch[0], order[stretch]))


def _passed(path: _Path, stretch: Stretch) -> bool:
    """Whether the rank is past a stretch, so that what it did in it is all that it will do."""
    if path.now == stretch:
        return False
    if stretch in path.stretches:
        return True
    # within a step, forward and backward passes come in an order of their own, then the other phases as numbered
    later = max(path.now[1], BACKWARD) > max(stretch[1], BACKWARD)
    return stretch[0] < path.now[0] or (stretch[0] == path.now[0] and later)


def _sides(paths: Sequence[_Path], stretch: Stretch) -> Dict[Tuple[Value, ...], List[_Path]]:
    """Ranks by what they did in a stretch; one that is still in it is with those that began as it did."""
    sides: Dict[Tuple[Value, ...], List[_Path]] = {}
    open_ones = []
    for path in paths:
        if _passed(path, stretch):
            sides.setdefault(path.values(stretch), []).append(path)
        elif path.now == stretch or stretch in path.stretches:
            open_ones.append(path)
    for path in sorted(open_ones, key=lambda one: -len(one.values(stretch))):
        mine = path.values(stretch)
        if not mine:
            continue  # tells nothing yet
        whole = [side for side in sides if side[: len(mine)] == mine]
        if whole:
            sides[max(whole, key=len)].append(path)
        else:
            sides.setdefault(mine, []).append(path)
    return sides


def _judge(
    flights: Mapping[int, Flight],
    name: str,
    paths: Sequence[_Path],
    stretch: Stretch,
    sides: Mapping[Tuple[Value, ...], List[_Path]],
) -> Deviation:
    """Which side has left the path: the fewer; else the one that is without example elsewhere and before."""
    most = max(len(side) for side in sides.values())
    support = {values: len(side) for values, side in sides.items()}
    undecided = False
    if sum(len(side) == most for side in sides.values()) > 1:
        examples = _examples(flights, name, [path.rank for path in paths], stretch)
        support = {
            values: sum(count for seen, count in examples.items() if _fits(values, seen, side, stretch))
            for values, side in sides.items()
        }
        best = max(support.values())
        if sum(count == best for count in support.values()) > 1:
            undecided = True  # the one that did less is named first: to forget is more common than to repeat
            support = {values: len(values) for values in sides}
    right = max(support, key=lambda values: support[values])
    wrong = min(support, key=lambda values: support[values])
    good, bad = sides[right], sides[wrong]
    others = tuple(sorted(path.rank for path in good)) if undecided else ()
    return _parting(good, bad, stretch, others)


def _fits(values: Tuple[Value, ...], seen: Tuple[Value, ...], side: Sequence[_Path], stretch: Stretch) -> bool:
    return values == seen or (all(not _passed(path, stretch) for path in side) and seen[: len(values)] == values)


def _parting(good: Sequence[_Path], bad: Sequence[_Path], stretch: Stretch, others: Tuple[int, ...]) -> Deviation:
    """How the two sides differ: the first call that does."""
    culprits, witnesses = (tuple(sorted(path.rank for path in side)) for side in (bad, good))
    due = max((path.stretches.get(stretch, []) for path in good), key=len)
    made = max((path.stretches.get(stretch, []) for path in bad), key=len)
    at = next((n for n, (a, b) in enumerate(zip(due, made)) if _value(a) != _value(b)), min(len(due), len(made)))
    if at == len(due) or _goes_on(due[at:], made[at + 1 :]):
        return Deviation(culprits, ONE_MORE, made[at], None, witnesses, others)
    if at == len(made) or _goes_on(made[at:], due[at + 1 :]):
        return Deviation(culprits, LEFT_OUT, due[at], None, witnesses, others)
    return Deviation(culprits, DISAGREE, due[at], made[at], witnesses, others)


def _goes_on(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether two beginnings of a list are one, and tell something."""
    pairs = list(zip(map(_value, calls), map(_value, others)))
    return bool(pairs) and all(ours == theirs for ours, theirs in pairs)


def _examples(
    flights: Mapping[int, Flight], name: str, ranks: Sequence[int], stretch: Stretch
) -> "Counter[Tuple[Value, ...]]":
    """What was done in the same stretch of earlier steps, and by other groups of the same name in this one."""
    seen: Counter[Tuple[Value, ...]] = Counter()
    near = [*ranks, *(rank for rank in flights if rank not in ranks)][:_MOST_RANKS]
    for rank in near:
        path = _whole_path(flights[rank], (name,), messages=False)
        steps = {call.step for call in flights[rank].calls[1:]} - {_cut(flights[rank])}
        for step in sorted(steps):
            if step < stretch[0] or (step == stretch[0] and rank not in ranks):
                other = (step, stretch[1], stretch[2])
                if _passed(path, other):
                    seen[path.values(other)] += 1
    return seen


def _whole_path(flight: Flight, names: Sequence[str], messages: bool) -> _Path:
    """A rank's calls on the named communicators, without the step of which the beginning is not known any more."""
    calls = flight.calls
    cut = _cut(flight)
    kept = [call for call in calls if call.communicator in names and call.step > cut]
    return _Path(flight, [call for call in kept if messages or not call.is_message])


def _cut(flight: Flight) -> int:
    """The last step of which the beginning is not known any more."""
    calls = flight.calls
    return calls[0].step if calls and calls[0].ordinal > 1 else _NEVER - 1


def _against_own_past(
    flights: Mapping[int, Flight], involved: Sequence[int], names: Sequence[str]
) -> Optional[Deviation]:
    """A rank's calls on all of the named communicators together, against those of its own earlier steps."""
    strays = []
    for rank in involved:
        if rank not in flights:
            continue
        path = _whole_path(flights[rank], names, messages=True)
        found = _strays(path)
        if found is not None:
            strays.append((rank, *found))
    if not strays or len(strays) == len(involved) > 1:
        return None
    rank, due, actual = strays[0]
    witnesses = tuple(other for other in involved if other != rank)
    if due is None:
        assert actual is not None
        return Deviation((rank,), ONE_MORE, actual, None, witnesses)
    if actual is None:
        return Deviation((rank,), LEFT_OUT, due, None, witnesses)
    return Deviation((rank,), ORDER, due, actual, witnesses)


def _strays(path: _Path) -> Optional[Tuple[Optional[Call], Optional[Call]]]:
    """The first call of the last step that is not as in any step before: (what was due, what came)."""
    for stretch in [one for one in path.stretches if one[0] == path.now[0]]:
        mine = path.stretches[stretch]
        values = path.values(stretch)
        earlier = [calls for other, calls in path.stretches.items() if other[1:] == stretch[1:] and other < stretch]
        if not earlier:
            continue
        if not _passed(path, stretch):
            if any(tuple(map(_value, calls))[: len(values)] == values for calls in earlier):
                continue
        elif any(tuple(map(_value, calls)) == values for calls in earlier):
            continue
        before = earlier[-1]
        at = next(
            (n for n, (a, b) in enumerate(zip(before, mine)) if _value(a) != _value(b)), min(len(before), len(mine))
        )
        return (
            _moved(before[at], stretch[0]) if at < len(before) else None,
            mine[at] if at < len(mine) else None,
        )
    return None


def _moved(call: Call, step: int) -> Call:
    """A call of an earlier step as it was due in this one."""
    return replace(call, step=step, sequence=0)


def _value(call: Call) -> Value:
    return call.site, call.operation, call.communicator, call.dtype, call.shape, call.peer
