"""The flight recorders of all ranks together: which rank is in which call, and for which ranks it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.records.flight import ENTERED, FINISHED, PHASES, Flight, RecordedCall

MISSING, GONE, STOPPED, SILENT = "missing", "gone", "stopped", "silent"
IN_WAIT, INSIDE, OUTSIDE, DONE = "waits", "inside", "outside", "finished"

CommunicatorKey = Tuple[str, Tuple[int, ...], int]  # a communicator: name, members, which one of these


@dataclass(frozen=True)
class Position:
    """Ranks that were last seen in the same call and the same progress.

    Attributes:
        ranks: in ascending order.
        state: ``waits``, ``inside`` a call that starts an operation, ``outside`` of MPI, ``finished``, and, if this can
            be determined, ``stopped``, ``gone`` (the process) or ``silent`` (its watchdog as well).
        call: the call that they wait for or are inside of; else the last call begun; None before the first.
        phase, step, micro_batch: their progress.
        since: time of the earliest last progress among them, seconds since the epoch.
        absent: ranks that they wait for.
    """

    ranks: Tuple[int, ...]
    state: str
    call: Optional[RecordedCall]
    phase: str
    step: int
    micro_batch: int
    since: float
    absent: Tuple[int, ...] = ()


class Recorders:
    """The recorders of all ranks, by rank and by communicator."""

    def __init__(self, flights: Sequence[Flight], processes: Mapping[int, str]) -> None:
        self.flights = {flight.rank: flight for flight in flights}
        ranks = max((flight.head.ranks for flight in flights), default=0)
        self.missing = [rank for rank in range(ranks) if rank not in self.flights]
        self.group_indices: Dict[CommunicatorKey, Dict[int, int]] = {}
        self._keys: Dict[int, List[CommunicatorKey]] = {}
        for flight in flights:
            keys = [(group.name, group.members, group.number) for group in flight.groups]
            self._keys[flight.rank] = keys
            for group_index, key in enumerate(keys):
                self.group_indices.setdefault(key, {})[flight.rank] = group_index
        self._newest = max((flight.head.watched for flight in flights), default=0.0)
        self._processes = processes
        self.calls = {flight.rank: flight.waiting for flight in flights}
        self._absent: Dict[Tuple[CommunicatorKey, int], Tuple[int, ...]] = {}
        self._elsewhere: Dict[CommunicatorKey, Tuple[int, ...]] = {}

    def key_of(self, rank: int, call: RecordedCall) -> Optional[CommunicatorKey]:
        """The communicator of a call; None if the file had no room for it."""
        keys = self._keys[rank]
        return keys[call.group] if call.group < len(keys) else None

    def state(self, rank: int) -> str:
        """State of a rank, as in :class:`Position`, or ``missing`` if it has no file."""
        if rank not in self.flights:
            return MISSING
        flight = self.flights[rank]
        head = flight.head
        if rank in self._processes:
            return self._processes[rank]
        if head.watched and self._newest - head.watched > max(head.timeout / 2, 1.0):
            return SILENT
        if self.calls[rank] is not None:
            return IN_WAIT
        last = flight.last
        if last is not None and last.state == ENTERED:
            return INSIDE
        return DONE if head.phase == FINISHED else OUTSIDE

    def absent(self, rank: int, call: RecordedCall) -> Tuple[int, ...]:
        """The ranks that have not begun the call in which this rank waits."""
        key = self.key_of(rank, call)
        if key is None:
            return ()
        if call.is_message:
            there = self._begun(key, call.peer, RECEIVE if call.operation == SEND else SEND, rank)
            return () if there >= call.sequence else (call.peer,)
        absent_ranks = self._absent.get((key, call.sequence))
        if absent_ranks is None:
            absent_ranks = tuple(
                member for member in key[1] if member != rank and self._collectives(key, member) < call.sequence
            )
            self._absent[key, call.sequence] = absent_ranks
        return absent_ranks

    def waited_for(self, rank: int, call: RecordedCall) -> Tuple[int, ...]:
        """The ranks that have not begun a call; if all have, those that are outside of MPI, without which the call
        cannot progress either."""
        absent, key = self.absent(rank, call), self.key_of(rank, call)
        if absent or key is None:
            return absent
        if call.is_message:
            return () if self.state(call.peer) in (IN_WAIT, DONE) else (call.peer,)
        outside_ranks = self._elsewhere.get(key)
        if outside_ranks is None:
            outside_ranks = tuple(member for member in key[1] if self.state(member) not in (IN_WAIT, DONE))
            self._elsewhere[key] = outside_ranks
        return outside_ranks

    def partners(self, rank: int, call: RecordedCall) -> Dict[int, RecordedCall]:
        """The same call as begun by other ranks, for those whose record of it is still there."""
        key = self.key_of(rank, call)
        partner_calls = {}
        for member in (call.peer,) if call.is_message else key[1] if key is not None else ():
            group_index = self.group_indices.get(key, {}).get(member) if key is not None else None
            if member == rank or group_index is None:
                continue
            flight = self.flights[member]
            if call.is_message:
                other = RECEIVE if call.operation == SEND else SEND
                partner_call = flight.message_at(group_index, rank, other, call.sequence)
            else:
                partner_call = flight.call_at(group_index, call.sequence)
            if partner_call is not None:
                partner_calls[member] = partner_call
        return partner_calls

    def positions(self) -> List[Position]:
        """All ranks, grouped by state, progress and call."""
        groups: Dict[Tuple[object, ...], List[int]] = {}
        for rank, flight in self.flights.items():
            call = self.calls[rank] or flight.last
            head = flight.head
            where: Tuple[object, ...] = (self.state(rank), head.phase, head.step, head.micro_batch)
            if call is not None:
                peer = call.peer - rank if call.is_message else 0
                where += (call.communicator, call.operation, call.shape, call.site, call.wait_site, call.sequence, peer)
            groups.setdefault(where, []).append(rank)
        positions = [self.position(tuple(ranks)) for ranks in groups.values()]
        return sorted(positions, key=_progress_key)

    def position(self, ranks: Tuple[int, ...]) -> Position:
        """The position of ranks that share state, progress and call."""
        first = self.flights[ranks[0]]
        call, head = self.calls[ranks[0]] or first.last, first.head
        absent: Set[int] = set()
        for rank in ranks:
            waiting_call = self.calls[rank]
            if waiting_call is not None:
                absent.update(self.waited_for(rank, waiting_call))
        since = min(self.flights[rank].head.progressed for rank in ranks)
        state = self.state(ranks[0])
        return Position(
            ranks, state, call, PHASES[head.phase], head.step, head.micro_batch, since, tuple(sorted(absent))
        )

    def idle(self, rank: int) -> float:
        """Seconds since the last recorded progress of a rank."""
        head = self.flights[rank].head
        return max(0.0, self._newest - head.progressed)

    def _collectives(self, key: CommunicatorKey, member: int) -> int:
        group_index = self.group_indices.get(key, {}).get(member)
        return self.flights[member].groups[group_index].collectives if group_index is not None else 0

    def _begun(self, key: CommunicatorKey, rank: int, operation: str, peer: int) -> int:
        group_index = self.group_indices.get(key, {}).get(rank)
        return self.flights[rank].messages(group_index, peer, operation) if group_index is not None else 0


def _progress_key(position: Position) -> Tuple[int, int, int, int, Tuple[int, ...]]:
    ordinal = position.call.ordinal if position.call is not None else 0
    return position.step, PHASES.index(position.phase), position.micro_batch, ordinal, position.ranks
