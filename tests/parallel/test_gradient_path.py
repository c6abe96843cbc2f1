"""Gradients of replicas are summed a few buckets at a time, while the backward pass goes on and after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, cast

import pytest
import torch

from fugaku_gpt.comm import BACKGROUND, Communicator
from fugaku_gpt.layout.sequence import runs_alone
from fugaku_gpt.layout.stages import split_layers, stage_tensors
from fugaku_gpt.model import build_stage, named_parameters
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.gradient_path import GradientReducer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


class Replica(Communicator):
    """One of two replicas with the same gradients, and what of them is under way; a sum takes some looks."""

    size = 2

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.under_way: List[Any] = []
        self.most = 0
        self.sums = 0

    def barrier(self) -> None:
        pass

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        self.under_way.append(tensor)
        self.most, self.sums = max(self.most, len(self.under_way)), self.sums + 1
        looks = self._looks

        def end() -> None:
            if any(other is tensor for other in self.under_way):
                self.under_way = [other for other in self.under_way if other is not tensor]
                tensor.mul_(2.0)

        def done() -> bool:
            nonlocal looks
            looks -= 1
            if looks < 0:
                end()
            return looks < 0

        return SimpleNamespace(done=done, wait=end)


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("looks", [0, 3, 1000], ids=["sums at once", "sums in time", "sums when waited for"])
def test_so_many_buckets_are_summed_at_a_time_and_each_once(looks: int, at_once: int) -> None:
    config = tiny_config("training.bucket_mib=0.001")
    pieces = build_stage(config, Communicator.alone(), split_layers(config.model.layers, 1))
    specs = stage_tensors(config.model, 1, split_layers(config.model.layers, 1), 0)
    buffers = FlatBuffers(named_parameters(pieces), specs, 1, int(config.training.bucket_mib * 2**20))
    replica, alone = Replica(looks), Communicator.alone()
    grid: Any = SimpleNamespace(dp=replica, replicas=replica, tp=alone, embedding=alone)
    sums = GradientReducer(buffers, pieces, grid, sharded=False, at_once=at_once)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    own: List[torch.Tensor] = []
    for step in range(5):
        replica.most = replica.sums = 0
        sums.begin()
        sums.last_backward(0)
        pieces[0](tokens[:, :-1], tokens[:, 1:], 0).sum().backward()
        in_backward = replica.sums
        if runs_alone(step):
            own.append(buffers.gradients.clone())
        sums.finish()
        assert in_backward == 0 if runs_alone(step) else in_backward >= min(at_once, 2)
        assert replica.sums == len(buffers.buckets) > 10 and not replica.under_way
        assert 1 <= replica.most <= at_once
        if looks == 1000:
            assert replica.most == min(at_once, len(buffers.buckets))
        assert not own or torch.equal(buffers.gradients, 2.0 * own[0])


def test_what_kernels_let_mpi_get_on_with_meanwhile_is_exposed_too() -> None:
    config = tiny_config("training.bucket_mib=0.001")
    pieces = build_stage(config, Communicator.alone(), split_layers(config.model.layers, 1))
    specs = stage_tensors(config.model, 1, split_layers(config.model.layers, 1), 0)
    buffers = FlatBuffers(named_parameters(pieces), specs, 1, int(config.training.bucket_mib * 2**20))
    alone, grid = Communicator.alone(), SimpleNamespace(dp=Replica(0), replicas=Replica(0))
    grid.tp = grid.embedding = alone
    sums = GradientReducer(buffers, pieces, cast(Any, grid), sharded=False)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    for _ in range(5):
        sums.begin()
        for micro_batch in range(2):
            if micro_batch == 1:
                sums.last_backward(0)
            pieces[0](tokens[:, :-1], tokens[:, 1:], 0).sum().backward()
            BACKGROUND._seconds += (1e6, 1e3)[micro_batch]  # of other things; of sums, if these have begun
        sums.finish()
    assert sums.overlap.sums.steps == sum(not runs_alone(step) for step in (3, 4))
    assert 1e3 < sums.overlap.sums.per_step < 2e3 and sums.overlap.sums.polled_seconds > 2e3
