"""Tests that a real pipeline idles as its schedule predicts, by a clock that only passes and messages move.

Ranks, messages and pipeline are real. A pass moves its rank's clock by what it takes; a message carries its sender's
clock, and a rank that waits for it continues when both ends were there. So the idle time follows from the order of
each rank's passes and waits, not from the machine: it must be exactly the predicted one.
``benchmarks/bubble.py`` measures the same step in seconds.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, cast

import pytest
import torch

from benchmarks.bubble import measured_bubble, predicted_bubble
from fugaku_gpt.comm import Communicator
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.layout.schedule_times import ideal_bubble

MICRO_BATCHES = 8
UNEVEN = (1.0, 0.5, 1.0, 1.5)  # work of each stage; all times here are exact in float32, which messages are in


class LogicalClock:
    """The clock of a rank."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.has_waited_for_a_send = False

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """A pass. Until the last one nobody waits for a send: the peer's receive may be posted late."""
        assert not self.has_waited_for_a_send
        self.seconds += seconds


class Receive:
    """A message on its way, which takes ``delay`` seconds from when both ends were there."""

    def __init__(self, pending: Pending, buffer: torch.Tensor, clock: LogicalClock, delay: float) -> None:
        self._pending, self._buffer, self._clock, self._delay = pending, buffer, clock, delay
        self._posted = clock.seconds

    def wait(self) -> None:
        self._pending.wait()
        arrival = max(self._posted, float(self._buffer[0, 0])) + self._delay
        self._clock.seconds = max(self._clock.seconds, arrival)


class Send:
    def __init__(self, pending: Pending, clock: LogicalClock) -> None:
        self._pending, self._clock = pending, clock

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> None:
        self._clock.has_waited_for_a_send = True
        self._pending.wait()


class Stamping:
    """A communicator whose messages carry the sender's clock."""

    def __init__(self, group: Communicator, clock: LogicalClock, delay: float) -> None:
        self._group, self._clock, self._delay = group, clock, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start_send(self, tensor: torch.Tensor, peer: int) -> Send:
        return Send(self._group.start_send(torch.full_like(tensor, self._clock.seconds), peer), self._clock)

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Receive:
        return Receive(self._group.start_receive(tensor, peer), tensor, self._clock, self._delay)


@pytest.mark.parametrize("delay", [0.0, 0.25])
@pytest.mark.parametrize(
    "kind, chunks, work",
    [
        ("gpipe", 1, None),
        ("1f1b", 1, None),
        ("interleaved", 2, None),
        ("zero_bubble", 1, None),
        ("1f1b", 1, UNEVEN),
    ],
)
def test_a_step_idles_as_long_as_the_schedule_predicts(
    world: Communicator, kind: str, chunks: int, work: Optional[Tuple[float, ...]], delay: float
) -> None:
    if world.size != 4:
        pytest.skip("four stages")
    predicted = predicted_bubble(kind, world.size, MICRO_BATCHES, chunks, 1.0, work, delay)
    ideal = ideal_bubble(kind, world.size, MICRO_BATCHES, chunks)
    assert ideal == 3 / 8 / (3 if kind == "zero_bubble" else chunks)
    if work is not None:
        assert predicted > 2 * ideal
    else:
        assert predicted > ideal if delay else predicted == pytest.approx(ideal)
    clock = LogicalClock()
    stage = cast(Communicator, Stamping(world, clock, delay))
    measured = measured_bubble(stage, kind, MICRO_BATCHES, chunks, 1.0, work, clock)
    assert measured == pytest.approx(predicted, rel=1e-12)
