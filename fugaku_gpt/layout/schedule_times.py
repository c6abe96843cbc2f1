"""How long a pipeline schedule takes, and how much of it is idle: by simulation, and by the formulas of papers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from fugaku_gpt.layout.rendezvous import Rendezvous
from fugaku_gpt.layout.schedules import (
    ACTIVATION,
    GRADIENT,
    ZERO_BUBBLE,
    Action,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Pass,
    source_of,
)

PassTimes = Dict[type, List[float]]  # kind of pass → what it takes, by chunk


@dataclass(frozen=True)
class Timing:
    """Durations of passes and messages, in any one unit.

    Attributes:
        forward, backward: of one micro-batch through each chunk, by number of the chunk; one number is for all.
        latency: of a message, from when both ends have posted it.
        weights: the part of the backward pass that computes gradients of weights, which some schedules defer.
    """

    forward: Union[float, Sequence[float]] = 1.0
    backward: Union[float, Sequence[float]] = 2.0
    latency: float = 0.0
    weights: Union[float, Sequence[float]] = 1.0


@dataclass(frozen=True)
class Times:
    """The timing of a simulated step.

    Attributes:
        makespan: from the start until the last stage is done.
        busy: time in computations, per stage.
    """

    makespan: float
    busy: Tuple[float, ...]

    @property
    def bubble(self) -> Tuple[float, ...]:
        """Idle over busy time of each stage: the (p - 1) / m of papers."""
        return tuple(self.makespan / busy - 1.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        """The mean over the stages, as the log measures it."""
        return sum(self.bubble) / len(self.busy)

    @property
    def idle_share(self) -> Tuple[float, ...]:
        """Idle over all time of each stage: (p - 1) / (m + p - 1)."""
        return tuple(1.0 - busy / self.makespan for busy in self.busy)


def simulate(schedules: Sequence[Sequence[Action]], timing: Timing = Timing(), waits_on_use: bool = True) -> Times:
    """How long the stages take for schedules that ``schedule_check.check_schedules`` has passed.

    With equal stages and free messages, late waits give :func:`ideal_bubble` for every kind and any ratio of backward
    to forward time; ``zero_bubble`` idles (p - 1) (forward + backward - 2 weights) where weights take least of the
    three. Waiting at once gives it for ``gpipe`` and ``1f1b``, but for ``interleaved`` only where backward
    takes as long as forward: else stages meet that are in the middle of something.

    Args:
        waits_on_use: an exchange stays open: a receive is waited for by the computation that uses it, a send by nobody;
            otherwise every exchange is waited for at once.

    Raises:
        ValueError: the schedules do not come to their end.
    """
    pass_times = _pass_times(schedules, timing)
    busy = [0.0] * len(schedules)
    for stage, actions in enumerate(schedules):
        for action in actions:
            if not isinstance(action, Exchange):
                busy[stage] += pass_times[type(action)][action.chunk]
    run = _end_times_waiting_on_use if waits_on_use else _end_times_waiting_at_once
    return Times(makespan=max(run(schedules, pass_times, timing.latency)), busy=tuple(busy))


class TimedPass(NamedTuple):
    """A computation of a simulated step.

    Attributes:
        arrived: when its input from another stage was there; None if it needs none.
    """

    action: Pass
    arrived: Optional[float]
    start: float
    end: float


def timed_passes(schedules: Sequence[Sequence[Action]], timing: Timing = Timing()) -> List[List[TimedPass]]:
    """When the computations of each stage take place, in the same simulation as :func:`simulate`, with late waits.

    Raises:
        ValueError: the schedules do not come to their end.
    """
    passes: List[List[TimedPass]] = [[] for _ in schedules]
    _end_times_waiting_on_use(
        schedules, _pass_times(schedules, timing), timing.latency, lambda stage, timed: passes[stage].append(timed)
    )
    return passes


def _pass_times(schedules: Sequence[Sequence[Action]], timing: Timing) -> PassTimes:
    chunks = 1 + max(action.chunk for s in schedules for action in s if not isinstance(action, Exchange))
    forward, backward, weights = (
        [float(time)] * chunks if isinstance(time, (int, float)) else [float(value) for value in time]
        for time in (timing.forward, timing.backward, timing.weights)
    )
    deferring_chunks = {
        action.chunk for actions in schedules for action in actions if isinstance(action, BackwardWeight)
    }
    backward = [time - weights[chunk] * (chunk in deferring_chunks) for chunk, time in enumerate(backward)]
    return {Forward: forward, BackwardInput: backward, BackwardWeight: weights}


def ideal_bubble(kind: str, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle over busy time of equal stages, messages free: (p - 1) / m; over v where interleaved.

    With fewer micro-batches than stages, an interleaved chunk waits until the first micro-batch has come round: p - m
    passes more, on each of v - 1 rounds. ``zero_bubble``: of passes whose three parts take alike; with fewer
    micro-batches than stages p - m parts more.
    """
    missing = max(0, stages - micro_batches)
    if kind == ZERO_BUBBLE:
        return (stages - 1 + missing) / (3 * micro_batches)
    if kind != "interleaved" or chunks == 1:
        return (stages - 1) / micro_batches
    return (stages - 1 + missing * (chunks - 1)) / (micro_batches * chunks)


def _end_times_waiting_at_once(
    schedules: Sequence[Sequence[Action]], pass_times: PassTimes, latency: float
) -> List[float]:
    """When each stage ends if every exchange is waited for immediately."""
    rendezvous = Rendezvous(len(schedules), latency)
    done = [0] * len(schedules)
    while rendezvous.runnable:
        stage = rendezvous.runnable.popleft()
        actions, position, time = schedules[stage], done[stage], rendezvous.clock[stage]
        is_runnable = True
        while is_runnable and position < len(actions):
            action = actions[position]
            position += 1
            if isinstance(action, Exchange):
                sends, receives = action.peer_messages()
                is_runnable = rendezvous.exchange(stage, time, sends, receives)
                time = rendezvous.clock[stage]
            else:
                time += pass_times[type(action)][action.chunk]
        done[stage] = position
        if is_runnable:
            rendezvous.clock[stage] = time
    _all_done(schedules, done, rendezvous.waiting)
    return rendezvous.clock


def _end_times_waiting_on_use(
    schedules: Sequence[Sequence[Action]],
    pass_times: PassTimes,
    latency: float,
    on_pass: Optional[Callable[[int, TimedPass], None]] = None,
) -> List[float]:
    """When each stage ends if a receive is waited for by the computation that uses it.

    Args:
        on_pass: called with the number of the stage and each of its computations, in their order.
    """
    stages, last = len(schedules), len(pass_times[Forward]) - 1
    posted: Dict[Tuple[str, int, int], float] = {}  # by the end that came first
    arrival: Dict[Tuple[str, int, int], float] = {}
    done, clock = [0] * stages, [0.0] * stages
    ready: Deque[int] = deque(range(stages))
    while ready:
        stage = ready.popleft()
        actions, position, time = schedules[stage], done[stage], clock[stage]
        while position < len(actions):
            action = actions[position]
            if isinstance(action, Exchange):
                for message in action.sends + action.receives:
                    if message.key not in posted:
                        posted[message.key] = time
                        continue
                    arrival[message.key] = max(posted.pop(message.key), time) + latency
                    ready.append(message.peer)
            else:
                arrived = None
                if stages > 1 and source_of(action, last) is not None:
                    kind = ACTIVATION if isinstance(action, Forward) else GRADIENT
                    key = (kind, action.micro_batch, action.chunk)
                    if key not in arrival:
                        break
                    arrived = arrival.pop(key)
                    time = max(time, arrived)
                start, time = time, time + pass_times[type(action)][action.chunk]
                if on_pass is not None:
                    on_pass(stage, TimedPass(action, arrived, start, time))
            position += 1
        done[stage], clock[stage] = position, time
    _all_done(schedules, done, [0] * stages)
    return clock


def _all_done(schedules: Sequence[Sequence[Action]], done: Sequence[int], waiting: Sequence[int]) -> None:
    for stage, position in enumerate(done):
        if position < len(schedules[stage]) or waiting[stage]:
            raise ValueError(f"stage {stage} waits for ever at action {position}; check the schedules first")
