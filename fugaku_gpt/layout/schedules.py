"""Pipeline schedules as data: what each stage computes and whom it talks to, in order.

Four kinds. With p stages, m micro-batches and v chunks per stage, idle time over busy time ("bubble") is:

* ``gpipe``: all forward passes, then all backward passes (Huang et al. 2019); (p - 1) / m, m micro-batches in flight.
* ``1f1b``: stage s starts with p - s - 1 forward passes, then one forward, one backward in turn (Narayanan et al. 2019,
  "PipeDream"; flushed every step); the same bubble, p - s micro-batches in flight.
* ``interleaved``: 1F1B over v chunks per stage (Narayanan et al. 2021, section 2.2); (p - 1) / (m v) for m >= p.
* ``zero_bubble``: 1F1B whose backward passes leave out the gradients of weights, which nobody else waits for; stage s
  makes those s micro-batches later (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1, schedule ZB-H1).
  Where forward pass, backward pass without them, and they themselves take alike, (p - 1) / (3 m) for m >= p. Every
  stage holds as many micro-batches as the first stage of 1F1B, and of one whose gradients of weights are put off more:
  16 tensors of b s h elements for a layer that keeps 10 before its backward pass. (Stage 0 puts nothing off.)

Any number of micro-batches is valid. Interleaving takes groups of micro-batches through all chunks; a group of at least
p has its next chunk's input waiting for it. Megatron-LM wants m to be a multiple of p; here m is cut into m // p groups
of p or a little more, so the formula holds for every m >= p, and only memory grows with the largest group. Below
p there is one group, which waits for itself to come round.

Every chunk sees its micro-batches in increasing order, forward and backward, in every kind: sums of gradients are the
same to the last bit.

**Messages.** Between two computations a stage has at most one :class:`Exchange`: all its sends and receives are posted
at once and waited for together. Placement follows one clock for all stages, in which every computation takes one tick:
a result is sent by the exchange right after its tick, and received by the last exchange of its receiver that is right
after this tick or an earlier one. Both are complete before either stage's next tick, by induction over ticks: no
deadlock, even when no send completes before its receive is posted. Messages from one stage to another keep their order,
as MPI does.

**Overlap.** Nothing gets stuck if one waits later or posts earlier, the order on each pair kept: fewer waits cannot
make a new circle of waits. So whoever runs a schedule may leave an exchange open: a receive must be done before the
computation that uses it, a send before its buffer is used again. Interleaving needs this for its small bubble
(``schedule_times.simulate``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Deque, Dict, List, Optional, Sequence, Tuple, Union

from fugaku_gpt.config.schema import PIPELINE_SCHEDULES
from fugaku_gpt.layout.rendezvous import PeerMessage

KINDS = PIPELINE_SCHEDULES
ACTIVATION, GRADIENT = "activation", "gradient"
ZERO_BUBBLE = "zero_bubble"


@dataclass(frozen=True)
class Forward:
    """The forward pass of one micro-batch through one chunk."""

    __slots__ = ("micro_batch", "chunk")
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class BackwardInput:
    """The backward pass of one micro-batch through one chunk, down to the gradient of the chunk's input. It frees what
    the forward pass has kept. Without :class:`BackwardWeight` in the schedule it makes the gradients of weights too;
    with it, it leaves them out and keeps what they need."""

    __slots__ = ("micro_batch", "chunk")
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class BackwardWeight:
    """The gradients of weights that :class:`BackwardInput` of the same micro-batch and chunk has left out."""

    __slots__ = ("micro_batch", "chunk")
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Message:
    """A tensor that one chunk sends to a neighbouring chunk.

    Attributes:
        kind: ``activation``, an output going forward, or ``gradient``, of an output, going backward.
        micro_batch: whose.
        chunk: the chunk that receives it, on both sides.
        peer: the stage at the other end: the receiver in a send, the sender in a receive.
    """

    __slots__ = ("kind", "micro_batch", "chunk", "peer")
    kind: str
    micro_batch: int
    chunk: int
    peer: int

    @property
    def key(self) -> Tuple[str, int, int]:
        """Identifies the message, the same on both sides."""
        return self.kind, self.micro_batch, self.chunk


@dataclass(frozen=True)
class Exchange:
    """Sends and receives that are posted together and waited for together."""

    __slots__ = ("sends", "receives")
    sends: Tuple[Message, ...]
    receives: Tuple[Message, ...]

    def peer_messages(self) -> Tuple[List[PeerMessage], List[PeerMessage]]:
        """Sends and receives as ``rendezvous.Rendezvous`` takes them."""
        return [(m.peer, m.key) for m in self.sends], [(m.peer, m.key) for m in self.receives]


Pass = Union[Forward, BackwardInput, BackwardWeight]
Action = Union[Pass, Exchange]


def schedule(kind: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> Tuple[Action, ...]:
    """The actions of one stage in one training step.

    Args:
        kind: one of ``KINDS``.
        chunks: chunks of each stage; above 1 for ``interleaved`` only, which with 1 is ``1f1b``.

    Raises:
        ValueError: a value that is not valid, and what would be.
    """
    _check(kind, stages, micro_batches, chunks)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage}: valid: 0 to {stages - 1}")
    order = stage_order(kind, stage, stages, micro_batches, chunks)
    if stages == 1:
        return tuple(order)
    ticks = _ticks(kind, stages, micro_batches, chunks)
    ends = [ticks[step] for step in order]
    sends: List[List[Message]] = [[] for _ in range(len(order) + 1)]  # [k]: of the exchange before computation k
    arriving: List[List[Tuple[int, int, Message]]] = [[] for _ in range(len(order) + 1)]
    last = stages * chunks - 1
    for position, step in enumerate(order):
        if isinstance(step, BackwardWeight):  # nobody else's business
            continue
        micro_batch, chunk = step.micro_batch, step.chunk
        kind_of, direction = (ACTIVATION, 1) if isinstance(step, Forward) else (GRADIENT, -1)
        if 0 <= chunk + direction <= last:
            receiver = chunk + direction
            sends[position + 1].append(Message(kind_of, micro_batch, receiver, receiver % stages))
        source = source_of(step, last)
        if source is not None:
            sent, peer = ticks[source], source.chunk % stages
            arriving[bisect_right(ends, sent)].append((sent, peer, Message(kind_of, micro_batch, chunk, peer)))
    actions: List[Action] = []
    for position in range(len(order) + 1):
        # a peer computes one thing per tick: sorted by tick, what comes from it is in the order of its sends
        receives = tuple(message for _, _, message in sorted(arriving[position], key=lambda item: item[:2]))
        if sends[position] or receives:
            actions.append(Exchange(tuple(sends[position]), receives))
        if position < len(order):
            actions.append(order[position])
    return tuple(actions)


def stage_order(kind: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> List[Pass]:
    """The computations of one stage, without messages."""
    groups = _groups(micro_batches, stages, chunks)
    forward = [Forward(i, c * stages + stage) for group in groups for c in range(chunks) for i in group]
    backward = [
        BackwardInput(i, c * stages + stage) for group in groups for c in reversed(range(chunks)) for i in group
    ]
    if kind == "gpipe":
        return [*forward, *backward]
    if chunks == 1:
        first = stages - stage - 1
    else:
        first = 2 * (stages - stage - 1) + (chunks - 1) * max(len(group) for group in groups)
    first = min(first, len(forward))
    order: List[Pass] = [*forward[:first]]
    for step, backward_step in zip(forward[first:], backward):
        order += (step, backward_step)
    order += backward[len(forward) - first :]
    return _with_deferred_weights(order, stage) if kind == ZERO_BUBBLE else order


def _with_deferred_weights(order: Sequence[Pass], delay: int) -> List[Pass]:
    """Insert the gradients of weights ``delay`` micro-batches after their backward passes."""
    passes: List[Pass] = []
    waiting: Deque[BackwardWeight] = deque()
    for step in order:
        passes.append(step)
        if isinstance(step, BackwardInput):
            waiting.append(BackwardWeight(step.micro_batch, step.chunk))
            if len(waiting) > delay:
                passes.append(waiting.popleft())
    return [*passes, *waiting]


def describe(action: Union[Action, Message]) -> str:
    """Describes an action or a message in words."""
    if isinstance(action, Message):
        return f"{action.kind} of micro-batch {action.micro_batch} for chunk {action.chunk} (peer: stage {action.peer})"
    if isinstance(action, Exchange):
        lists = (
            (verb, ", ".join(map(describe, messages)))
            for verb, messages in (("sends", action.sends), ("receives", action.receives))
        )
        return " and ".join(f"{verb} {listed}" for verb, listed in lists if listed) or "exchanges nothing"
    name = {Forward: "forward", BackwardInput: "backward", BackwardWeight: "gradients of weights"}[type(action)]
    return f"{name} of micro-batch {action.micro_batch} through chunk {action.chunk}"


def _groups(micro_batches: int, stages: int, chunks: int) -> List[range]:
    """Runs of micro-batches that go through all chunks together, the longer ones first."""
    if chunks == 1:
        return [range(micro_batches)]
    count = max(1, micro_batches // stages)
    size, longer = divmod(micro_batches, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:])]


def _check(kind: str, stages: int, micro_batches: int, chunks: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"schedule {kind!r}: valid: {', '.join(KINDS)}")
    if stages < 1 or micro_batches < 1 or chunks < 1:
        raise ValueError(
            f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks per stage: valid: 1 or more of each"
        )
    if chunks > 1 and kind != "interleaved":
        raise ValueError(f"schedule {kind} with {chunks} chunks per stage: valid: 1, or the schedule interleaved")


@lru_cache(maxsize=2)
def _ticks(kind: str, stages: int, micro_batches: int, chunks: int) -> Dict[Pass, int]:
    """At which tick each computation ends when all take one tick and start as soon as they can."""
    orders = [stage_order(kind, stage, stages, micro_batches, chunks) for stage in range(stages)]
    return _earliest(orders, stages * chunks - 1)


def _earliest(orders: Sequence[Sequence[Pass]], last: int) -> Dict[Pass, int]:
    stages = len(orders)
    ticks: Dict[Pass, int] = {}
    done, clock = [0] * stages, [0] * stages
    ready: Deque[int] = deque(range(stages))
    while ready:
        stage = ready.popleft()
        order, position, tick = orders[stage], done[stage], clock[stage]
        while position < len(order):
            step = order[position]
            source = source_of(step, last)
            if source is not None:
                arrived = ticks.get(source)
                if arrived is None:
                    break
                tick = max(tick, arrived)
            tick += 1
            ticks[step] = tick
            position += 1
        if position > done[stage]:
            done[stage], clock[stage] = position, tick
            ready.extend(((stage + 1) % stages, (stage - 1) % stages))
    if any(done[stage] < len(orders[stage]) for stage in range(stages)):
        raise AssertionError("a schedule's order of computations waits for itself")
    return ticks


def source_of(step: Pass, last: int) -> Optional[Pass]:
    """The computation on another chunk whose result a computation takes."""
    if isinstance(step, Forward) and step.chunk > 0:
        return Forward(step.micro_batch, step.chunk - 1)
    if isinstance(step, BackwardInput) and step.chunk < last:
        return BackwardInput(step.micro_batch, step.chunk + 1)
    return None
