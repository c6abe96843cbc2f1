"""Diagnoses hangs: finds the rank that causes others to wait, from all ranks' flight recorders (files only, no MPI).

A rank that waits in a collective waits for the members that have not begun it; one that waits for a message waits for
its other end. Followed from rank to rank, this leads to a rank that waits for nobody (it is stopped, dead, finished, or
busy outside MPI), to calls that do not agree, or round in a circle. In a circle or a disagreement, the earlier calls of
each rank show which one has left the common path (``hang/history.py``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.hang.against_plan import compare_with_plan
from fugaku_gpt.hang.history import EXTRA_CALL, LEFT_OUT, ORDER, Deviation, find_deviation
from fugaku_gpt.hang.recorders import (
    DONE,
    GONE,
    IN_WAIT,
    INSIDE,
    MISSING,
    OUTSIDE,
    SILENT,
    STOPPED,
    Position,
    Recorders,
)
from fugaku_gpt.layout.operations import SEND
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.flight import FINISHED, PHASES, WAITING, Flight, Head, RecordedCall, read_flight
from fugaku_gpt.records.text import spans

DISAGREE, CIRCLE, NO_HANG = "disagree", "circle", "no hang"
_ENDED, _STOPPED = ("", "Z", "X"), ("T", "t")  # letters of processes in /proc
# kinds of causes, besides the states of a rank: LEFT_OUT, EXTRA_CALL, ORDER, DISAGREE, CIRCLE


@dataclass(frozen=True)
class Hang:
    """Diagnosis of a hang.

    Attributes:
        verdict: one line, with the cause first.
        culprits: ranks that are the cause; empty if no rank waits.
        kind: state of the culprits' position, or ``left out``, ``one more``, ``order``, ``disagree``, ``circle``.
        call: the call that the culprit left out, made once more or made with other values, or in which other ranks wait
            for it.
        chain: sentences that state which rank waits for which, from a waiting rank to the cause.
        positions: positions of all ranks, the least advanced first.
        missing: ranks without a file.
        other_suspects: ranks that could equally well be the cause.
        not_compared: why ranks were not compared with the plan of a step, in one line; empty if all were.
    """

    verdict: str
    culprits: Tuple[int, ...]
    kind: str
    call: Optional[RecordedCall]
    chain: List[str]
    positions: List[Position]
    missing: Tuple[int, ...]
    other_suspects: Tuple[int, ...] = ()
    not_compared: str = ""


def read_flights(directory: Path) -> List[Flight]:
    """Read the flight recorders of a run, in the order of their ranks.

    Raises:
        UsageError: a file is not a flight recorder's.
    """
    return sorted((read_flight(path) for path in directory.glob("*/rank-*.flight")), key=lambda flight: flight.rank)


def diagnose_hang(
    flights: Sequence[Flight],
    processes: Optional[Mapping[int, str]] = None,
    config: Union[RunConfig, str, None] = None,
) -> Hang:
    """Determine which rank waits for which, and which one is the cause.

    Args:
        flights: in the order of their ranks, not empty.
        processes: rank → state of its process (see :func:`process_states`).
        config: configuration of the run, or why it cannot be read: a rank whose calls differ from its layout's plan is
            the cause. None to compare nothing.
    """
    recorders = Recorders(flights, processes if processes is not None else {})
    hang = _diagnose_waits(recorders)
    if config is None or hang.kind == NO_HANG:
        return hang
    deviation, not_compared = compare_with_plan(recorders.flights, config, [*hang.culprits, *hang.other_suspects])
    if deviation is not None:
        by_plan = _hang_by_deviation(deviation, hang.chain)
        hang = replace(by_plan, positions=hang.positions, missing=hang.missing)
    return replace(hang, not_compared=not_compared)


def _diagnose_waits(recorders: Recorders) -> Hang:
    """Find the cause by following which rank waits for which."""
    positions = recorders.positions()
    waiting = [position for position in positions if position.state == IN_WAIT]
    if not waiting:
        return _hang_without_waits(recorders, positions)
    best: Optional[Hang] = None
    for position in sorted(waiting, key=lambda candidate: -len(candidate.ranks)):
        hang = _follow_waits(recorders, position)
        if best is None or _strength(hang) > _strength(best):
            best = hang
    assert best is not None
    return replace(best, positions=positions, missing=tuple(recorders.missing))


def process_states(heads: Iterable[Head], host: str) -> Dict[int, str]:
    """Return rank → state of its process, if gone or stopped; empty if no rank's process is alive on this machine.

    Args:
        host: name of this machine.
    """
    states = {}
    alive = False
    for head in heads:
        if head.host != host:
            continue
        letter = _process_letter(head)
        alive = alive or letter not in _ENDED
        if letter in _ENDED and head.phase != FINISHED:  # a rank that has finished may end before the others
            states[head.rank] = GONE
        elif letter in _STOPPED:
            states[head.rank] = STOPPED
    return states if alive else {}  # if all are gone, there is no telling which one went first


def living_ranks(heads: Iterable[Head], host: str) -> List[int]:
    """Return the ranks whose processes live on this machine, and are not stopped.

    Args:
        host: name of this machine.
    """
    return [head.rank for head in heads if head.host == host and _process_letter(head) not in _ENDED + _STOPPED]


def has_process(head: Head) -> bool:
    """Whether the process of a rank of this machine is there, if only stopped."""
    return _process_letter(head) not in _ENDED


def describe_call(call: RecordedCall) -> str:
    """``all_reduce_sum of [4, 8] on tp at parallel/tensor.py:12 (call 17 there; iteration 3, forward of micro-batch
    1)``."""
    operation = call.operation
    if call.is_message:
        operation += f" {'to' if call.operation == SEND else 'from'} rank {call.peer}"
    site = call.wait_site if call.wait_site and call.state == WAITING else call.site
    posted = f", begun at {call.site}" if site != call.site else ""
    where = describe_progress(call.step, PHASES[min(call.phase, FINISHED)], call.micro_batch)
    return (
        f"{operation} of {list(call.shape)} on {call.communicator} at {site}{posted} "
        f"({f'number {call.sequence} there; ' if call.sequence else ''}{where})"
    )


def describe_progress(step: int, phase: str, micro_batch: int) -> str:
    """``iteration 3, forward of micro-batch 1``."""
    where = f"{phase} of micro-batch {micro_batch}" if micro_batch >= 0 and phase != "finished" else phase
    return f"iteration {step}, {where}" if step >= 0 else where


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    return f"rank {spans(ranks)}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def _hang_without_waits(recorders: Recorders, positions: List[Position]) -> Hang:
    """Diagnose ranks of which none waits in MPI: unfinished ones are busy, or their processes have ended."""
    missing = tuple(recorders.missing)
    left = [position for position in positions if position.state != DONE]
    if not left:
        return Hang("no rank waits: all have finished", (), NO_HANG, None, [], positions, missing)
    silent = [position for position in left if position.state in (GONE, STOPPED, SILENT)]
    suspects = silent or [position for position in left if position.since == min(other.since for other in left)]
    ranks = tuple(sorted(rank for position in suspects for rank in position.ranks))
    first = suspects[0]
    verdict = f"{_are_the_cause(ranks)}: no rank waits in MPI; {_describe_sink(recorders, ranks[0], len(ranks))}"
    return Hang(verdict, ranks, first.state, first.call, [], positions, missing)


def _strength(hang: Hang) -> Tuple[int, float]:
    """Rank of an explanation: an observed process state is stronger than a conclusion from calls."""
    order = [CIRCLE, DONE, OUTSIDE, INSIDE, ORDER, DISAGREE, EXTRA_CALL, LEFT_OUT, SILENT, MISSING, GONE, STOPPED]
    return order.index(hang.kind) if hang.kind in order else -1, -float(len(hang.chain))


def _follow_waits(recorders: Recorders, start: Position) -> Hang:
    """Follow the waits from a rank to one that does not wait, or round a circle."""
    chain: List[str] = []
    path: List[int] = []
    rank = start.ranks[0]
    ranks: Tuple[int, ...] = start.ranks
    while True:
        path.append(rank)
        call = recorders.calls[rank]
        assert call is not None
        disagreeing = _disagreement(recorders, rank, call)
        if disagreeing is not None:
            return _hang_by_history(recorders, path, chain, disagreeing)
        absent = recorders.waited_for(rank, call)
        chain.append(_describe_wait(ranks, call, absent))
        if not absent:
            return _hang_by_history(recorders, path, chain, None)
        states = {other: recorders.state(other) for other in absent}
        sinks = [other for other in absent if states[other] != IN_WAIT]
        if sinks:
            return _hang_by_sink(recorders, sinks, path, call, chain)
        if absent[0] in path:
            circle = path[path.index(absent[0]) :]
            return _hang_by_history(recorders, circle, chain, None)
        rank = absent[0]
        ranks = (rank,)


def _hang_by_sink(
    recorders: Recorders, sinks: List[int], path: List[int], call: RecordedCall, chain: List[str]
) -> Hang:
    """Diagnose ranks that do not wait, while others wait for them in ``call``."""
    order = [STOPPED, GONE, MISSING, SILENT, INSIDE, OUTSIDE, DONE]
    worst = min((recorders.state(rank) for rank in sinks), key=order.index)
    culprits = tuple(sorted(rank for rank in sinks if recorders.state(rank) == worst))
    if worst == DONE:  # it has passed the call; its history shows how
        deviation = find_deviation(recorders.flights, [*path[-1:], *culprits], _communicator_names(recorders, path))
        if deviation is not None:
            return _hang_by_deviation(deviation, chain)
    description = _describe_sink(recorders, culprits[0], len(culprits))
    blame = f"{_are_the_cause(culprits)}: {description}"
    verdict = f"{blame}; {describe_ranks(path[:1])} and others wait for it in {describe_call(call)}"
    if len(recorders.flights) == 2 or len(path) == 1:
        waiters = sorted(rank for rank, own in recorders.calls.items() if own is not None)
        verdict = f"{blame}; {describe_ranks(waiters)} wait{'s' * (len(waiters) == 1)} for it, in {describe_call(call)}"
    return Hang(verdict, culprits, worst, call, chain, [], ())


def _describe_sink(recorders: Recorders, rank: int, count: int) -> str:
    they, have, are = ("they", "have", "are") if count > 1 else ("it", "has", "is")
    if rank not in recorders.flights:
        return f"{they} left no record: not started, or on a node whose files are not here"
    flight = recorders.flights[rank]
    head, last, state = flight.head, flight.last, recorders.state(rank)
    where = describe_progress(head.step, PHASES[head.phase], head.micro_batch)
    seen = f"{they} {'were' if count > 1 else 'was'} last seen in {where}"
    idle = recorders.idle(rank)
    since = f" since {idle:.1f} s" if idle > 0 else ""
    after = f" after {describe_call(last)}" if last is not None else ""
    return {
        GONE: f"process {head.process} on {head.host} is gone; {seen}{after}",
        STOPPED: f"process {head.process} on {head.host} is stopped; {seen}{after}",
        SILENT: f"process {head.process} on {head.host} is stopped, dead or stuck outside Python; {seen}{after}",
        INSIDE: f"{they} {have} not come out of {describe_call(last)}{since}" if last is not None else seen,
        OUTSIDE: f"{they} {are} busy outside MPI{since}, in {where}{after}",
        DONE: f"{they} {have} finished",
    }.get(state, seen)


def _disagreement(recorders: Recorders, rank: int, call: RecordedCall) -> Optional[Dict[int, RecordedCall]]:
    """Each rank's version of a call, if they differ in operation, shape, data type or root; else None."""
    calls = {rank: call, **recorders.partners(rank, call)}
    if len({_signature(own_call) for own_call in calls.values()}) < 2:
        return None
    return calls


def _signature(call: RecordedCall) -> Tuple[object, ...]:
    if call.is_message:
        return call.dtype, call.shape
    return call.operation, call.dtype, call.shape, call.peer


def _hang_by_history(
    recorders: Recorders, path: List[int], chain: List[str], calls: Optional[Dict[int, RecordedCall]]
) -> Hang:
    """Diagnose ranks that wait for each other, or whose calls disagree, by their earlier calls."""
    names = _communicator_names(recorders, path)
    involved = sorted(set(path) | set(calls or {}))
    deviation = find_deviation(recorders.flights, involved, names)
    if deviation is not None:
        return _hang_by_deviation(deviation, chain)
    if calls is not None:
        return _hang_by_disagreement(calls, chain)
    call = recorders.calls[path[0]]
    each = "; ".join(
        f"rank {rank} in {describe_call(own)}" for rank, own in ((rank, recorders.calls[rank]) for rank in path) if own
    )
    verdict = f"{describe_ranks(sorted(path))} wait for each other, each in a call that another has not come to: {each}"
    return Hang(verdict, tuple(sorted(path)), CIRCLE, call, chain, [], ())


def _hang_by_disagreement(calls: Dict[int, RecordedCall], chain: List[str]) -> Hang:
    """Diagnose a call whose values differ between ranks: the minority is the cause, if there is one."""
    by_value: Dict[Tuple[object, ...], List[int]] = {}
    for rank, call in sorted(calls.items()):
        by_value.setdefault(_signature(call), []).append(rank)
    sides = sorted(by_value.values(), key=len)
    tie = len(sides[0]) == len(sides[-1])
    culprits = tuple(sorted(calls)) if tie else tuple(sides[0])
    versions = "; ".join(f"{describe_ranks(ranks)}: {describe_call(calls[ranks[0]])}" for ranks in sides)
    verdict = f"{_are_the_cause(culprits)}: the same call does not agree: {versions}"
    return Hang(verdict, culprits, DISAGREE, calls[sides[0][0]], chain, [], ())


def _hang_by_deviation(deviation: Deviation, chain: List[str]) -> Hang:
    blame = _are_the_cause(deviation.culprits)
    they = "they" if len(deviation.culprits) > 1 else "it"
    if deviation.kind == LEFT_OUT:
        description = f"{they} left out {describe_call(deviation.call)}, {_as_made(deviation)}"
    elif deviation.kind == EXTRA_CALL:
        description = f"{they} made {describe_call(deviation.call)}, which is one call more than {_made_by(deviation)}"
    elif deviation.kind == ORDER:
        description = f"{they} came to {describe_call(deviation.actual or deviation.call)} "
        description += f"where {describe_call(deviation.call)} was due"
        description += ": it was left out, or the two come in another order there"
    else:
        description = f"{they} made {describe_call(deviation.actual or deviation.call)}, where {_made_by(deviation)} "
        description += describe_call(deviation.call)
    doubt = ""
    if deviation.alternatives:
        doubt = f" (or {describe_ranks(deviation.alternatives)} did otherwise: nothing earlier is known to tell which)"
    call = deviation.actual if deviation.kind == DISAGREE and deviation.actual is not None else deviation.call
    return Hang(
        f"{blame}: {description}{doubt}",
        deviation.culprits,
        deviation.kind,
        call,
        chain,
        [],
        (),
        deviation.alternatives,
    )


def _made_by(deviation: Deviation) -> str:
    return f"{describe_ranks(deviation.witnesses)} made" if deviation.witnesses else "the plan of a step has"


def _as_made(deviation: Deviation) -> str:
    return (
        f"as {describe_ranks(deviation.witnesses)} made it" if deviation.witnesses else "which the plan of a step has"
    )


def _communicator_names(recorders: Recorders, path: List[int]) -> List[str]:
    calls = (recorders.calls[rank] for rank in path)
    return sorted({call.communicator for call in calls if call is not None})


def _describe_wait(ranks: Tuple[int, ...], call: RecordedCall, absent: Tuple[int, ...]) -> str:
    for_whom = f" for {describe_ranks(absent)}" if absent else ", which all have begun"
    return f"{describe_ranks(ranks)} wait{'s' * (len(ranks) == 1)}{for_whom} in {describe_call(call)}"


def _are_the_cause(ranks: Sequence[int]) -> str:
    return f"{describe_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} the cause"


def _process_letter(head: Head) -> str:
    """State letter of the rank's process from /proc; "" if it is gone, or if its id now belongs to another process."""
    try:
        text = this_system().path(f"proc/{head.process}/stat").read_text(encoding="utf-8", errors="replace")
        boot = next(
            int(line.split()[1])
            for line in this_system().path("proc/stat").read_text(encoding="utf-8").splitlines()
            if line.startswith("btime")
        )
    except (OSError, StopIteration):
        return ""
    fields = text.rpartition(")")[2].split()
    began = boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] if began <= head.started + 2.0 else ""
