"""How many messages of a pipeline live at once: as many as stages lag behind each other, not as micro-batches."""

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
    """A communicator that counts the messages of its parts, in number and bytes, from their start until nobody keeps
    them any more."""

    def __init__(self, whole: Communicator) -> None:
        super().__init__(whole._handle, whole.name, shares_cores=True)
        self.parts = [self]
        self.now = self.most = self.bytes_now = self.most_bytes = self.messages = 0

    def split(self, color: Optional[int], key: int, name: str) -> Communicator:
        part = Counting(super().split(color, key, name))
        self.parts.append(part)
        return part

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
        self.now += count
        self.bytes_now += size
        self.most, self.most_bytes = max(self.most, self.now), max(self.most_bytes, self.bytes_now)


def messages_of(world: Communicator, micro_batches: int, *settings: str) -> Tuple[int, int, int, int]:
    """(all, most at once, their bytes, those that are left) messages of one step of a pipeline over all ranks."""
    config = tiny_config(
        "model.layers=4", f"layout.pp={world.size}", f"training.global_batch={micro_batches}", *settings
    )
    counting = Counting(world)
    trainer = Trainer(config, ProcessGrid(counting, config.layout), ByteSamples(config.model.seq_len))
    trainer.step()
    trainer.finish()
    (pp,) = [part for part in counting.parts if part.messages]
    return pp.messages, pp.most, pp.most_bytes, pp.now


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_eight_times_the_micro_batches_do_not_keep_more_messages(world: Communicator, schedule: str) -> None:
    if world.size != 2:
        pytest.skip("two stages")
    settings = [f"layout.schedule={schedule}", f"layout.chunks={2 if schedule == 'interleaved' else 1}"]
    few, many = (messages_of(world, micro_batches, *settings) for micro_batches in (8, 64))
    print(f"\n{schedule}: {few} of 8 micro-batches, {many} of 64", flush=True)
    assert many[0] == 8 * few[0] and few[3] == many[3] == 0
    assert many[1:3] == few[1:3] and many[1] < 8
