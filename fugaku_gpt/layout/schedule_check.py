"""Checks pipeline schedules without running them: that they are complete, in order, and free of deadlock.

The check is exact under the strictest message passing (``rendezvous.py``): every send waits for its receive, every
exchange for all its messages. It needs only the lists of actions, whatever made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Sequence, Set, Tuple

from fugaku_gpt.layout.rendezvous import Mismatch, Rendezvous
from fugaku_gpt.layout.schedules import (
    ACTIVATION,
    GRADIENT,
    Action,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Pass,
    describe,
    source_of,
)


class ScheduleError(ValueError):
    """A schedule that cannot be run as it is.

    Attributes:
        stage, position: the stage, and the place in its list of actions, where it shows; the length of the list where
            something is missing at the end.
    """

    def __init__(self, stage: int, position: int, problem: str) -> None:
        super().__init__(f"stage {stage}, action {position}: {problem}")
        self.stage = stage
        self.position = position


@dataclass(frozen=True)
class ScheduleReport:
    """The result of a check.

    Attributes:
        actions: computations and exchanges of all stages.
        messages: of all stages, each counted once.
        peak_in_flight: per stage, most pairs of (micro-batch, chunk) whose forward pass is done and whose backward pass
            is not: what activations are kept for. Each is of one chunk, a part of the stage's layers.
        peak_arrived: per stage, most messages that are received, or being received, and not yet used.
        peak_retained: per stage, most pairs that are in flight or whose gradients of weights are not made yet.
    """

    actions: int
    messages: int
    peak_in_flight: Tuple[int, ...]
    peak_arrived: Tuple[int, ...]
    peak_retained: Tuple[int, ...]


def check_schedules(schedules: Sequence[Sequence[Action]], micro_batches: int, chunks: int = 1) -> ScheduleReport:
    """Prove that stages which follow these schedules do all of a step's work, in order, and cannot get stuck.

    Checked: every forward and backward pass once and on the right stage, and where any stage puts off gradients of
    weights, these too; each after what it needs, computed here or received; every result that a neighbour needs is sent
    to it once, after it was computed; every send meets its receive, in order on each directed pair of stages; and all
    stages come to their end if every send waits for its receive.

    Args:
        schedules: the actions of each stage (see ``schedules.schedule``).
        chunks: chunks of each stage.

    Raises:
        ScheduleError: the first thing that is wrong.
    """
    ledgers = []
    defers_weight_grads = any(isinstance(action, BackwardWeight) for actions in schedules for action in actions)
    for stage, actions in enumerate(schedules):
        ledger = _Ledger(stage, len(schedules), micro_batches, chunks, defers_weight_grads)
        for position, action in enumerate(actions):
            ledger.enter(position, action)
        ledger.close(len(actions))
        ledgers.append(ledger)
    _check_rendezvous(schedules)
    return ScheduleReport(
        actions=sum(len(actions) for actions in schedules),
        messages=sum(ledger.sent for ledger in ledgers),
        peak_in_flight=tuple(ledger.peak_in_flight for ledger in ledgers),
        peak_arrived=tuple(ledger.peak_arrived for ledger in ledgers),
        peak_retained=tuple(ledger.peak_retained for ledger in ledgers),
    )


class _Ledger:
    """Tracks what one stage has received, computed and still has to send, as its own list of actions shows it."""

    def __init__(self, stage: int, stages: int, micro_batches: int, chunks: int, defers_weight_grads: bool) -> None:
        """``defers_weight_grads``: gradients of weights are computations of their own."""
        self.sent = self.peak_in_flight = self.peak_arrived = self.peak_retained = 0
        self._stage, self._stages = stage, stages
        self._micro_batches, self._last = micro_batches, stages * chunks - 1
        self._expected = micro_batches * chunks
        self._forwards: Set[Tuple[int, int]] = set()
        self._backwards: Set[Tuple[int, int]] = set()
        self._weights: Set[Tuple[int, int]] = set()
        self._defers_weight_grads = defers_weight_grads
        self._arrived: Set[Tuple[str, int, int]] = set()
        self._used: Set[Tuple[str, int, int]] = set()
        self._unsent: Dict[Tuple[str, int, int], int] = {}  # to which stage

    def enter(self, position: int, action: Action) -> None:
        """Enter the next action.

        Raises:
            ScheduleError: it cannot be done now, or here.
        """
        if isinstance(action, Exchange):
            problem = self._exchange(action)
        else:
            problem = self._compute(action)
        if problem:
            raise ScheduleError(
                self._stage, position, problem if isinstance(action, Exchange) else f"{describe(action)}: {problem}"
            )

    def close(self, position: int) -> None:
        """Judge the end.

        Raises:
            ScheduleError: something is left to do.
        """
        problem = ""
        for name, done in (("forward passes", self._forwards), ("backward passes", self._backwards)):
            if len(done) != self._expected:
                problem = problem or f"{len(done)} {name} are done; {self._expected} are needed"
        if self._defers_weight_grads and len(self._weights) != self._expected:
            problem = problem or f"{len(self._weights)} gradients of weights are made; {self._expected} are needed"
        for keys, fate in ((self._unsent, "never sent"), (self._arrived, "never used")):
            for kind, micro_batch, chunk in keys:
                problem = problem or f"{kind} of micro-batch {micro_batch} for chunk {chunk} is {fate}"
        if problem:
            raise ScheduleError(self._stage, position, problem)

    def _exchange(self, exchange: Exchange) -> str:
        for message in exchange.sends + exchange.receives:
            if not 0 <= message.peer < self._stages or message.peer == self._stage:
                return f"{describe(message)}: there is no such other stage"
        for message in exchange.sends:
            if self._unsent.get(message.key) != message.peer:
                return f"sends {describe(message)}, which is not there to send, or not for that stage"
            del self._unsent[message.key]
            self.sent += 1
        for message in exchange.receives:
            if message.key in self._arrived or message.key in self._used:
                return f"receives {describe(message)} a second time"
            self._arrived.add(message.key)
        self.peak_arrived = max(self.peak_arrived, len(self._arrived))
        return ""

    def _compute(self, action: Pass) -> str:
        step = micro_batch, chunk = action.micro_batch, action.chunk
        if not (0 <= chunk <= self._last and chunk % self._stages == self._stage):
            return "is not this stage's"
        if not 0 <= micro_batch < self._micro_batches:
            return f"there are {self._micro_batches} micro-batches"
        done, first, name = {
            Forward: (self._forwards, None, ""),
            BackwardInput: (self._backwards, self._forwards, "forward pass"),
            BackwardWeight: (self._weights, self._backwards, "backward pass"),
        }[type(action)]
        if step in done:
            return "is done already"
        if first is not None and step not in first:
            return f"its {name} is not done"
        if not isinstance(action, BackwardWeight):
            problem = self._pass_on(action, done)
            if problem:
                return problem
        done.add(step)
        in_flight = len(self._forwards) - len(self._backwards)
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        retained = len(self._forwards) - len(self._weights) if self._defers_weight_grads else in_flight
        self.peak_retained = max(self.peak_retained, retained)
        return ""

    def _pass_on(self, action: Pass, done: Set[Tuple[int, int]]) -> str:
        """Use what another chunk has sent, and owe the next one the result."""
        micro_batch, chunk = action.micro_batch, action.chunk
        kind, ahead = (ACTIVATION, 1) if isinstance(action, Forward) else (GRADIENT, -1)
        source, after = source_of(action, self._last), chunk + ahead
        if source is not None:
            key = (kind, micro_batch, chunk)
            if (micro_batch, source.chunk) not in done if self._stages == 1 else key not in self._arrived:
                return f"its {kind} is not there"
            self._arrived.discard(key)
            self._used.add(key)
        if 0 <= after <= self._last and self._stages > 1:
            self._unsent[kind, micro_batch, after] = after % self._stages
        return ""


def _check_rendezvous(schedules: Sequence[Sequence[Action]]) -> None:
    """Each message meets itself, in order, and all stages come to their end under synchronous sends."""
    exchanges = [[(p, a) for p, a in enumerate(actions) if isinstance(a, Exchange)] for actions in schedules]
    posted = [0] * len(schedules)
    rendezvous = Rendezvous(len(schedules))
    while rendezvous.runnable:
        stage = rendezvous.runnable.popleft()
        while posted[stage] < len(exchanges[stage]):
            position, exchange = exchanges[stage][posted[stage]]
            posted[stage] += 1
            sends, receives = exchange.peer_messages()
            try:
                if not rendezvous.exchange(stage, 0.0, sends, receives):
                    break
            except Mismatch as error:
                raise ScheduleError(stage, position, f"stage {error}: not in the order of their messages") from None
    stuck = [
        (stage, *exchanges[stage][posted[stage] - 1]) for stage in range(len(schedules)) if rendezvous.waiting[stage]
    ]
    if stuck:
        who = "; ".join(f"stage {stage} at action {position}: {describe(a)}" for stage, position, a in stuck[:8])
        more = f"; and {len(stuck) - 8} more" if len(stuck) > 8 else ""
        raise ScheduleError(stuck[0][0], stuck[0][1], f"deadlock: these wait for each other: {who}{more}")
