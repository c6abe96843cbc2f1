"""The strictest message passing there is, without running anything: who can go on, when, and who waits for whom.

A send completes only when its receive is posted, a collective only when every member is there. What cannot get stuck
here cannot get stuck on any MPI library, which may only be kinder. Every step is looked at once, so the cost grows with
the number of messages, not with waiting.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Hashable, List, Optional, Sequence, Tuple

Part = Tuple[int, Hashable]  # the participant at the other end, what is sent: both ends must say the same


class Mismatch(ValueError):
    """Two ends of a message, or two members of a collective, do not say the same.

    Attributes:
        participant, mine: who came second, and so was found out, and what it says.
        other, theirs: who was there first, and what that one says.
        sends: the second is the sender; None for a collective.
    """

    def __init__(
        self, participant: int, mine: Hashable, other: int, theirs: Hashable, sends: Optional[bool] = None
    ) -> None:
        verb = {None: "has", True: "sends", False: "receives"}
        against = None if sends is None else not sends
        super().__init__(f"{participant} {verb[sends]} {mine}, where {other} {verb[against]} {theirs}")
        self.participant, self.mine, self.other, self.theirs, self.sends = participant, mine, other, theirs, sends


class Rendezvous:
    """Participants that post and wait: whoever has posted waits, and is in ``runnable`` again when it may go on.

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

    def exchange(self, me: int, now: float, sends: Sequence[Part], receives: Sequence[Part]) -> bool:
        """Post all parts at once; whether all are met already. If not, ``me`` will be in ``runnable`` when they are.

        Raises:
            Mismatch: the next message of a pair is another one at the other end.
        """
        self.clock[me] = now
        self.waiting[me] = len(sends) + len(receives)
        for peer, what in sends:
            self._meet(me, peer, (me, peer), True, what, now)
        for peer, what in receives:
            self._meet(me, peer, (peer, me), False, what, now)
        return not self.waiting[me]

    def collective(self, me: int, now: float, group: Hashable, members: int, what: Hashable) -> bool:
        """Join a collective of a group of so many members; as :meth:`exchange`.

        Raises:
            Mismatch: another member is in another operation.
        """
        there = self._collectives.setdefault(group, [])
        if there and there[0][1] != what:
            raise Mismatch(me, what, there[0][0], there[0][1])
        self.clock[me] = now
        there.append((me, what, now))
        if len(there) < members:
            self.waiting[me] = 1
            return False
        complete = max(when for _, _, when in there) + self._latency
        del self._collectives[group]
        for member, _, _ in there:
            self.clock[member] = complete
            self.waiting[member] = 0
            if member != me:
                self.runnable.append(member)
        return True

    def _meet(self, me: int, peer: int, pair: Tuple[int, int], is_send: bool, what: Hashable, now: float) -> None:
        posted = self._open.get(pair)
        if posted is None:
            posted = self._open[pair] = deque()
        if not posted or posted[0][0] == is_send:
            posted.append((is_send, what, now))
            return
        _, other, when = posted.popleft()
        if other != what:
            raise Mismatch(me, what, peer, other, sends=is_send)
        complete = max(now, when) + self._latency
        for participant in (me, peer):
            if complete > self.clock[participant]:
                self.clock[participant] = complete
            self.waiting[participant] -= 1
        if not self.waiting[peer] and peer != me:
            self.runnable.append(peer)
