"""Tests that gradients are added up, deferred, ready and reduced according to the schedule: buckets in order, a few at
a time, during the backward pass and after it."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, List, Tuple, cast

import pytest
import torch
from torch import nn

from fugaku_gpt.comm import BACKGROUND, Communicator
from fugaku_gpt.layout.communications import is_calibration_step
from fugaku_gpt.layout.stages import split_layers, stage_tensors
from fugaku_gpt.model import build_stage, named_parameters
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.gradient_path import (
    DeferredWeightGrads,
    GradientReducer,
    GradientSlot,
    add_weight_grad,
    attach_main_grad,
    main_grad,
)
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


class Replica(Communicator):
    """One of two replicas with equal gradients, which records outstanding sums; a sum is done after some polls."""

    size = 2

    def __init__(self, polls: int) -> None:
        self._polls = polls
        self.outstanding: List[Any] = []
        self.most = 0
        self.sums = 0

    def barrier(self) -> None:
        pass

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        self.outstanding.append(tensor)
        self.most, self.sums = max(self.most, len(self.outstanding)), self.sums + 1
        polls = self._polls

        def end() -> None:
            if any(other is tensor for other in self.outstanding):
                self.outstanding = [other for other in self.outstanding if other is not tensor]
                tensor.mul_(2.0)

        def done() -> bool:
            nonlocal polls
            polls -= 1
            if polls < 0:
                end()
            return polls < 0

        return SimpleNamespace(done=done, wait=end)


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("polls", [0, 3, 1000], ids=["sums at once", "sums in time", "sums when waited for"])
def test_no_more_than_the_allowed_buckets_are_reduced_at_a_time_and_each_once(polls: int, at_once: int) -> None:
    config = tiny_config("training.bucket_mib=0.001")
    pieces = build_stage(config, Communicator.alone(), split_layers(config.model.layers, 1))
    specs = stage_tensors(config.model, 1, split_layers(config.model.layers, 1), 0)
    buffers = FlatBuffers(named_parameters(pieces), specs, 1, int(config.training.bucket_mib * 2**20))
    replica, alone = Replica(polls), Communicator.alone()
    grid: Any = SimpleNamespace(dp=replica, replicas=replica, tp=alone, embedding=alone)
    reducer = GradientReducer(buffers, {0: pieces[0]}, grid, sharded=False, buckets_at_once=at_once)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    own: List[torch.Tensor] = []
    for step in range(5):
        replica.most = replica.sums = 0
        reducer.begin()
        reducer.begin_backward(0, 0, is_last=True)
        pieces[0](tokens[:, :-1], tokens[:, 1:], 0).sum().backward()
        reducer.end_backward()
        in_backward = replica.sums
        if is_calibration_step(step):
            own.append(buffers.gradients.clone())
        reducer.finish()
        assert in_backward == 0 if is_calibration_step(step) else in_backward >= min(at_once, 2)
        assert replica.sums == len(buffers.buckets) > 10 and not replica.outstanding
        assert 1 <= replica.most <= at_once
        if polls == 1000:
            assert replica.most == min(at_once, len(buffers.buckets))
        assert not own or torch.equal(buffers.gradients, 2.0 * own[0])


def test_sum_time_that_is_polled_inside_kernels_counts_as_exposed() -> None:
    config = tiny_config("training.bucket_mib=0.001")
    pieces = build_stage(config, Communicator.alone(), split_layers(config.model.layers, 1))
    specs = stage_tensors(config.model, 1, split_layers(config.model.layers, 1), 0)
    buffers = FlatBuffers(named_parameters(pieces), specs, 1, int(config.training.bucket_mib * 2**20))
    alone, grid = Communicator.alone(), SimpleNamespace(dp=Replica(0), replicas=Replica(0))
    grid.tp = grid.embedding = alone
    reducer = GradientReducer(buffers, {0: pieces[0]}, cast(Any, grid), sharded=False)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    for _ in range(5):
        reducer.begin()
        for micro_batch in range(2):
            reducer.begin_backward(micro_batch, 0, is_last=micro_batch == 1)
            pieces[0](tokens[:, :-1], tokens[:, 1:], 0).sum().backward()
            reducer.end_backward()
            BACKGROUND._seconds += (1e6, 1e3)[micro_batch]  # of other communication; of sums, if these have begun
        reducer.finish()
    assert reducer.overlap.sums.steps == sum(not is_calibration_step(step) for step in (3, 4))
    assert 1e3 < reducer.overlap.sums.per_step < 2e3 and reducer.overlap.sums.polled_seconds > 2e3


def slot_and_parameter(deferrals: DeferredWeightGrads) -> Tuple[GradientSlot, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(3))
    slot = GradientSlot(torch.zeros(3), deferrals)
    attach_main_grad(parameter, slot)
    return slot, parameter


def noting(log: List[str], text: str) -> Callable[[], None]:
    return lambda: log.append(text)


def test_a_parameter_has_a_main_grad_only_if_attached_and_if_it_requires_a_gradient() -> None:
    slot, parameter = slot_and_parameter(DeferredWeightGrads())
    assert main_grad(parameter) is slot.main_grad
    parameter.requires_grad_(False)
    assert main_grad(parameter) is None and main_grad(nn.Parameter(torch.zeros(3))) is None


def test_outside_a_backward_pass_that_defers_products_are_made_at_once() -> None:
    made: List[str] = []
    slot, parameter = slot_and_parameter(DeferredWeightGrads())
    add_weight_grad(parameter, noting(made, "product"))
    assert made == ["product"] and not slot.deferred_products


def test_products_wait_for_their_pass_and_each_parameter_is_reported_when_none_is_left() -> None:
    deferrals, log = DeferredWeightGrads(), []  # type: DeferredWeightGrads, List[str]
    slots, parameters = zip(*(slot_and_parameter(deferrals) for _ in range(2)))
    for micro_batch in (0, 1):
        deferrals.begin((micro_batch, 0))
        for number, parameter in enumerate(parameters):
            add_weight_grad(parameter, noting(log, f"{number} of {micro_batch}"))
        deferrals.end()
    assert log == [] and [slot.deferred_products for slot in slots] == [2, 2]

    def finished(slot: GradientSlot) -> None:
        log.append(f"{slots.index(slot)} finished")

    deferrals.make((0, 0), finished)
    assert log == ["0 of 0", "1 of 0"] and [slot.deferred_products for slot in slots] == [1, 1]
    deferrals.make((1, 0), finished)
    assert log[2:] == ["0 of 1", "0 finished", "1 of 1", "1 finished"]


def test_a_product_releases_tensors_as_soon_as_it_is_made() -> None:
    deferrals, alive = DeferredWeightGrads(), []  # type: DeferredWeightGrads, List[int]
    _, parameter = slot_and_parameter(deferrals)
    tensors = [torch.ones(3) for _ in range(2)]
    watched = [weakref.ref(tensor) for tensor in tensors]

    def count() -> None:
        alive.append(sum(ref() is not None for ref in watched))

    deferrals.begin((0, 0))
    for tensor in tensors:
        add_weight_grad(parameter, lambda tensor=tensor: (tensor.mul_(2.0), count()))  # type: ignore[misc]
    deferrals.end()
    del tensor, tensors
    deferrals.make((0, 0))
    assert alive == [2, 1]
    count()
    assert alive[-1] == 0


class Sharer(nn.Module):
    """A chunk that uses a weight which another chunk uses too, as the first and the last use the token embedding."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared = shared

    def forward(self) -> torch.Tensor:
        return self.shared.sum()


def flat_of(sizes: List[Tuple[str, int]], bucket: int) -> Any:
    """Stand-in for flat buffers: consecutive tensors, in buckets of ``bucket`` elements."""
    starts = [sum(size for _, size in sizes[:index]) for index in range(len(sizes))]
    total = sum(size for _, size in sizes)
    placements = [
        SimpleNamespace(spec=SimpleNamespace(name=name, copies=1), start=start, span=slice(start, start + size))
        for (name, size), start in zip(sizes, starts)
    ]
    buckets = [slice(start, min(start + bucket, total)) for start in range(0, total, bucket)]
    empty = slice(0, 0)
    layout = SimpleNamespace(copied=empty, summed_over_tp=lambda sequence_parallel: empty, tied=lambda shards: [])
    buffers: Any = SimpleNamespace(gradients=torch.zeros(total), placements=placements, buckets=buckets, layout=layout)
    buffers.buckets_of = partial(FlatBuffers.buckets_of, buffers)
    return buffers


def two_chunks(replica: Replica) -> Tuple[GradientReducer, List[Sharer], Any]:
    shared = nn.Parameter(torch.ones(4))
    chunks = [Sharer(shared), Sharer(shared)]
    buffers = flat_of([("shared", 4)], 4)
    alone = Communicator.alone()
    grid: Any = SimpleNamespace(dp=replica, replicas=replica, tp=alone, embedding=alone)
    return GradientReducer(buffers, {0: chunks[0], 1: chunks[1]}, grid, sharded=False), chunks, buffers


def finish_calibration(reducer: GradientReducer) -> None:
    """Take the calibration steps, which reduce nothing during the backward pass."""
    reducer.begin()
    while reducer._is_calibration:
        reducer.finish()
        reducer.begin()


def test_a_shared_parameter_is_ready_after_the_last_pass_of_each_chunk_that_uses_it() -> None:
    replica = Replica(0)
    reducer, chunks, buffers = two_chunks(replica)
    finish_calibration(reducer)
    replica.sums = 0
    for micro_batch, chunk, is_last in ((0, 1, False), (1, 1, True), (0, 0, False), (1, 0, True)):
        assert replica.sums == 0
        reducer.begin_backward(micro_batch, chunk, is_last)
        chunks[chunk]().backward()
        reducer.end_backward()
    assert replica.sums == 1
    reducer.finish()
    assert torch.equal(buffers.gradients, torch.full((4,), 8.0))


def add_ten(sums: torch.Tensor) -> None:
    sums.add_(10.0)


def test_a_parameter_is_ready_when_the_last_deferred_product_is_made() -> None:
    replica = Replica(0)
    reducer, chunks, buffers = two_chunks(replica)
    finish_calibration(reducer)
    replica.sums = 0
    reducer.begin_backward(0, 1, is_last=True)
    chunks[1]().backward()
    reducer.end_backward()
    reducer.begin_backward(0, 0, is_last=True, is_deferring=True)
    sums = main_grad(chunks[0].shared)
    assert sums is not None
    add_weight_grad(chunks[0].shared, partial(add_ten, sums))
    chunks[0]().backward()
    reducer.end_backward()
    assert replica.sums == 0 and buffers.gradients.tolist() == [2.0] * 4
    reducer.make_deferred(0, 0)
    assert replica.sums == 1
    reducer.finish()
    assert buffers.gradients.tolist() == [24.0] * 4


def test_a_grid_without_the_groups_that_hold_copies_of_heads_is_refused() -> None:
    config = tiny_config("model.kv_heads=1", "layout.tp=2")
    pair = cast(Any, SimpleNamespace(size=2, rank=0))
    chunks = split_layers(config.model.layers, 1)
    pieces = build_stage(config, pair, chunks)
    buffers = FlatBuffers(named_parameters(pieces), stage_tensors(config.model, 2, chunks, 0), tp=2)
    grid = SimpleNamespace(tp=pair, dp=Communicator.alone(), embedding=Communicator.alone(), kv=Communicator.alone())
    with pytest.raises(ValueError, match="2 copies of heads were given groups of 1"):
        GradientReducer(buffers, {0: pieces[0]}, cast(Any, grid), sharded=False)
    grid.kv = pair
    GradientReducer(buffers, {0: pieces[0]}, cast(Any, grid), sharded=False)
