"""Tests that the live messages of a pipeline grow with the lag between stages, not with the micro-batches."""

from __future__ import annotations

import weakref
from typing import Optional, Tuple

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


class Counting(Communicator):
    """A communicator that counts the messages on it and on those split off from it, in number and bytes, from their
    start until nothing refers to them."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator._handle, communicator.name, shares_cores=True)
        self.communicators = [self]
        self.live = self.peak = self.live_bytes = self.peak_bytes = self.messages = 0

    def split(self, color: Optional[int], key: int, name: str) -> Communicator:
        child = Counting(super().split(color, key, name))
        self.communicators.append(child)
        return child

    def start_send(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._count(super().start_send(tensor, peer), tensor)

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._count(super().start_receive(tensor, peer), tensor)

    def _count(self, pending: Pending, tensor: torch.Tensor) -> Pending:
        size = tensor.numel() * tensor.element_size()
        self.messages += 1
        self._change(1, size)
        weakref.finalize(pending, self._change, -1, -size)
        return pending

    def _change(self, count: int, size: int) -> None:
        self.live += count
        self.live_bytes += size
        self.peak, self.peak_bytes = max(self.peak, self.live), max(self.peak_bytes, self.live_bytes)


def messages_of(world: Communicator, micro_batches: int, *settings: str) -> Tuple[int, int, int, int]:
    """Counts messages of a step of a pipeline over all ranks: (all, peak of live ones, its bytes, live at the end)."""
    config = tiny_config(
        "model.layers=4", f"layout.pp={world.size}", f"training.global_batch={micro_batches}", *settings
    )
    counting = Counting(world)
    trainer = Trainer(config, ProcessGrid(counting, config.layout), ByteSamples(config.model.seq_len))
    trainer.step()
    trainer.finish()
    (pp,) = [communicator for communicator in counting.communicators if communicator.messages]
    return pp.messages, pp.peak, pp.peak_bytes, pp.live


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_eight_times_the_micro_batches_keep_no_more_messages_alive(world: Communicator, schedule: str) -> None:
    if world.size != 2:
        pytest.skip("two stages")
    settings = [f"layout.schedule={schedule}", f"layout.chunks={2 if schedule == 'interleaved' else 1}"]
    few, many = (messages_of(world, micro_batches, *settings) for micro_batches in (8, 64))
    print(f"\n{schedule}: {few} of 8 micro-batches, {many} of 64", flush=True)
    assert many[0] == 8 * few[0] and few[3] == many[3] == 0
    # how far a stage gets ahead within its bound of 4 sends depends on when the other one runs
    assert max(few[1], many[1]) < 8 and few[2] // few[1] == many[2] // many[1]
