"""Tests of one stage of a pipeline whose neighbours are slow."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch

from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.parallel.pipeline import Pipeline


class SlowNeighbour:
    """A communicator of two stages whose other stage takes a message only when this one waits for that."""

    size = 2

    def __init__(self) -> None:
        self.sent: List[float] = []
        self.taken: List[float] = []
        self.peak = 0

    def mark_phase(self, phase: str, **values: int) -> None:
        """Nobody looks at the phase."""

    def start_send(self, tensor: torch.Tensor, peer: int) -> "Sent":
        self.sent.append(float(tensor.max()))
        self.peak = max(self.peak, len(self.sent) - len(self.taken))
        return Sent(self, self.sent[-1])


class Sent:
    """A message on its way."""

    def __init__(self, neighbour: SlowNeighbour, value: float) -> None:
        self._neighbour, self._value = neighbour, value

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._neighbour.taken.append(self._value)


@pytest.mark.parametrize("micro_batches", [3, 64])
def test_a_stage_that_gets_ahead_waits_for_the_oldest_message(micro_batches: int) -> None:
    neighbour: Any = SlowNeighbour()
    actions = schedule("gpipe", 0, 2, micro_batches)
    stage = Pipeline(actions, neighbour, last_chunk=1, shape=(2, 3), dtype=torch.float32)
    with torch.no_grad():  # validation: nothing comes back
        stage.run(lambda micro_batch, chunk, x: torch.full((2, 3), float(micro_batch)))
    assert neighbour.peak == min(micro_batches, 4)
    assert neighbour.sent == neighbour.taken == [float(number) for number in range(micro_batches)]
