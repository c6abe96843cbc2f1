"""Simulates the strictest message passing, without running anything: who can continue, when, and who waits for whom.

A send completes only when its receive is posted, a collective only when every member is there. What cannot deadlock
here cannot deadlock on any MPI library, which may only be more lenient. Every step is visited once, so the cost grows
with the number of messages, not with waiting.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Hashable, List, Optional, Sequence, Tuple

PeerMessage = Tuple[int, Hashable]  # the participant at the other end, what is sent: both ends must say the same


class Mismatch(ValueError):
    """Two ends of a message, or two members of a collective, do not match.

    Attributes:
        participant, actual: the participant that came second, and its message or operation.
        other, expected: the participant that came first, and its message or operation.
        is_send: whether the second is the sender; None for a collective.
    """

    def __init__(
        self, participant: int, actual: Hashable, other: int, expected: Hashable, is_send: Optional[bool] = None
    ) -> None:
        verb = {None: "has", True: "sends", False: "receives"}
        against = None if is_send is None else not is_send
        super().__init__(f"{participant} {verb[is_send]} {actual}, where {other} {verb[against]} {expected}")
        self.participant, self.actual, self.other, self.expected, self.is_send = (
            participant,
            actual,
            other,
            expected,
            is_send,
        )


class Rendezvous:
    """Participants that post and wait: a participant that has posted waits, and is in ``runnable`` again when it may
    continue.

    Attributes:
        runnable: participants that wait for nothing; all, at the start.
        clock: per participant, when its last post was complete [the unit of ``latency``].
        waiting: per participant, the parts of its last post that are not met.
    """

    def __init__(self, participants: int, latency: float = 0.0) -> None:
        self.runnable: Deque[int] = deque(range(participants))
        self.clock = [0.0] * participants
        self.waiting = [0] * participants
        self._latency = latency
        # per directed pair, what one side has posted and the other has not: (is a send, what, poster, when)
        self._open: Dict[Tuple[int, int], Deque[Tuple[bool, Hashable, float]]] = {}
        self._collectives: Dict[Hashable, List[Tuple[int, Hashable, float]]] = {}

    def exchange(
        self, participant: int, time: float, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]
    ) -> bool:
        """Post all messages at once and return whether all are matched already. If not, ``participant`` will be in
        ``runnable`` once they are.

        Raises:
            Mismatch: the next message of a pair is another one at the other end.
        """
        self.clock[participant] = time
        self.waiting[participant] = len(sends) + len(receives)
        for peer, message in sends:
            self._match(participant, peer, (participant, peer), True, message, time)
        for peer, message in receives:
            self._match(participant, peer, (peer, participant), False, message, time)
        return not self.waiting[participant]

    def collective(self, participant: int, time: float, group: Hashable, members: int, operation: Hashable) -> bool:
        """Join a collective of a group of ``members`` participants; returns as :meth:`exchange` does.

        Raises:
            Mismatch: another member is in another operation.
        """
        arrived = self._collectives.setdefault(group, [])
        if arrived and arrived[0][1] != operation:
            raise Mismatch(participant, operation, arrived[0][0], arrived[0][1])
        self.clock[participant] = time
        arrived.append((participant, operation, time))
        if len(arrived) < members:
            self.waiting[participant] = 1
            return False
        completion = max(posted_at for _, _, posted_at in arrived) + self._latency
        del self._collectives[group]
        for member, _, _ in arrived:
            self.clock[member] = completion
            self.waiting[member] = 0
            if member != participant:
                self.runnable.append(member)
        return True

    def _match(
        self, participant: int, peer: int, pair: Tuple[int, int], is_send: bool, message: Hashable, time: float
    ) -> None:
        posted = self._open.get(pair)
        if posted is None:
            posted = self._open[pair] = deque()
        if not posted or posted[0][0] == is_send:
            posted.append((is_send, message, time))
            return
        _, other_message, posted_at = posted.popleft()
        if other_message != message:
            raise Mismatch(participant, message, peer, other_message, is_send=is_send)
        completion = max(time, posted_at) + self._latency
        for end in (participant, peer):
            if completion > self.clock[end]:
                self.clock[end] = completion
            self.waiting[end] -= 1
        if not self.waiting[peer] and peer != participant:
            self.runnable.append(peer)
