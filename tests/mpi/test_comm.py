"""Tests of the communicator against the definitions of the collectives, on real ranks."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import List

import numpy as np
import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import BACKGROUND, Communicator, FlightRecorder, ProcessGrid
from fugaku_gpt.comm.pending import OUTSTANDING, BackgroundProgress
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.errors import CallsDisagree
from fugaku_gpt.layout.grid import coordinates_of, dp_group, tp_group
from fugaku_gpt.records.flight import flight_file, read_flight
from fugaku_gpt.training.trainer import Trainer
from tests.support.tiny import tiny_config


def test_sum_max_and_min_are_in_place_and_equal_everywhere(world: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        for operation, expected in (
            ("sum", sum(range(1, world.size + 1))),
            ("max", world.size),
            ("min", 1),
        ):
            tensor = torch.full((3, 5), world.rank + 1, dtype=dtype)
            address = tensor.data_ptr()
            world.all_reduce(tensor, operation)
            assert tensor.data_ptr() == address
            assert torch.equal(tensor, torch.full((3, 5), expected, dtype=dtype))


def test_messages_past_the_largest_count_are_split(world: Communicator) -> None:
    narrow = Communicator(world._handle, "narrow", max_elements=7)
    tensor = torch.arange(50, dtype=torch.float64) * (world.rank + 1)
    narrow.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(50, dtype=torch.float64) * sum(range(1, world.size + 1)))
    copied = torch.arange(50) if world.rank == 0 else torch.zeros(50, dtype=torch.int64)
    narrow.broadcast(copied)
    assert torch.equal(copied, torch.arange(50))


def test_all_gather_stacks_by_rank(world: Communicator) -> None:
    gathered = world.all_gather(torch.full((2, 3), float(world.rank)))
    assert gathered.shape == (world.size, 2, 3)
    assert [float(part[0, 0]) for part in gathered] == list(map(float, range(world.size)))


def test_a_tensor_with_gaps_is_refused_before_anything_is_sent(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("a group of one sends nothing")
    with pytest.raises(ValueError, match="contiguous"):
        world.all_reduce(torch.zeros(4, 4).t()[1:, :])
    world.barrier()


def test_json_goes_to_rank_0_and_back_to_all(world: Communicator) -> None:
    gathered = world.gather_json({"rank": world.rank, "text": "é" * world.rank})
    if world.rank == 0:
        assert gathered == [{"rank": rank, "text": "é" * rank} for rank in range(world.size)]
    else:
        assert gathered is None
    assert world.broadcast_json({"from": 0} if world.rank == 0 else None) == {"from": 0}


def _layouts(ranks: int) -> List[LayoutConfig]:
    return [LayoutConfig(dp=ranks // tp, tp=tp) for tp in range(1, ranks + 1) if ranks % tp == 0]


def test_the_grid_joins_the_ranks_that_the_layout_names(world: Communicator) -> None:
    for layout in _layouts(world.size):
        grid = ProcessGrid(world, layout)
        coordinates = coordinates_of(world.rank, layout)
        own_rank = torch.tensor([world.rank])
        assert grid.tp.all_gather(own_rank).reshape(-1).tolist() == list(tp_group(coordinates, layout))
        assert grid.dp.all_gather(own_rank).reshape(-1).tolist() == list(dp_group(coordinates, layout))


def test_tp_and_dp_collectives_may_follow_each_other_in_any_number(world: Communicator) -> None:
    for layout in _layouts(world.size):
        grid = ProcessGrid(world, layout)
        for _ in range(20):
            tensor = torch.ones(64)
            grid.tp.all_reduce(tensor)
            grid.dp.all_reduce(tensor)
            assert float(tensor[0]) == world.size


def test_a_grid_of_the_wrong_size_is_refused(world: Communicator) -> None:
    with pytest.raises(ValueError, match="ranks"):
        ProcessGrid(world, LayoutConfig(dp=world.size + 1))


def test_calls_that_disagree_are_named_before_they_are_made(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("a group of one makes no calls")
    checked = Communicator(world._handle, "checked", shares_cores=True, checks=True)
    tensor = torch.ones(6)
    checked.all_reduce(tensor)
    assert float(tensor[0]) == world.size
    with pytest.raises(CallsDisagree, match=r"communicator checked: .* all_reduce_sum of torch.float32 \[5\] at "):
        checked.all_reduce(torch.ones(5 if world.rank == 1 else 6))
    with pytest.raises(CallsDisagree, match=r"rank 0: .*\[2\].* at mpi/test_comm.py:\d+; rank 1"):
        checked.start_all_reduce(torch.ones(2)) if world.rank == 0 else checked.barrier()
    if world.rank == 0:
        checked.start_send(torch.ones(4), 1).wait()
        checked.start_send(torch.ones(3), 1)
    if world.rank == 1:
        memory = np.zeros(4, dtype=np.float32)
        arrived = torch.from_numpy(memory)
        checked.start_receive(arrived, 0).wait()
        assert float(arrived.sum()) == 4
        with pytest.raises(CallsDisagree, match=r"rank 1 waits for .*\[4\] at .*, but rank 0 sends .*\[3\]"):
            checked.start_receive(arrived, 0).wait()
        alive = weakref.ref(memory)
        del arrived, memory
        gc.collect()
        assert alive() is not None, "MPI may still write what was refused into memory that is used for something else"


def test_the_flight_recorder_names_communicator_call_and_line(world: Communicator, tmp_path: Path) -> None:
    if world.size == 1:
        pytest.skip("a group of one makes no calls")
    recorded = Communicator(world._handle, "world", FlightRecorder(tmp_path, world.rank, world.size))
    tp = recorded.split(0, recorded.rank, "tp")
    tp.all_reduce(torch.zeros(4, 2))
    recorded.barrier()
    split, first, second = read_flight(flight_file(tmp_path, world.rank)).calls
    assert (split.communicator, split.operation) == ("world", "split")
    assert (first.communicator, first.operation, first.dtype, first.shape) == (
        "tp",
        "all_reduce_sum",
        "torch.float32",
        (4, 2),
    )
    assert "test_comm.py:" in first.site and "test_comm.py:" in second.site
    assert second.operation == "barrier" and first.left >= first.entered > 0


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no compiled kernels: fugaku-gpt env kernels")
def test_messages_move_while_kernels_compute(world: Communicator) -> None:
    """A sum that takes several steps of messages completes though its ranks call MPI only from within kernels."""
    if world.size == 1:
        pytest.skip("a group of one sends nothing")
    tensor, qkv = torch.full((1 << 20,), float(world.rank + 1)), torch.zeros(1, 1, 512, 3, 16)
    background = BackgroundProgress()
    ops.set_progress_callback(background.poll, 0.0)
    try:
        pending = world.start_all_reduce(tensor)
        deadline = time.monotonic() + 60
        while pending in OUTSTANDING:
            assert time.monotonic() < deadline
            ops.attention(qkv, 1, ops.KeyRanges.causal(512), None, 1.0)
    finally:
        ops.set_progress_callback(None, 0.0)
    assert background.pop_seconds() > 0.0
    pending.wait()
    assert torch.equal(tensor, torch.full_like(tensor, sum(range(1, world.size + 1))))


@pytest.mark.parametrize("progress", [2.0, 0.0])
def test_kernels_poll_messages_if_configured_and_only_with_several_ranks(
    world: Communicator, progress: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: List[object] = []
    monkeypatch.setattr(ops, "set_progress_callback", lambda *arguments: calls.append(arguments))
    config = tiny_config(f"layout.dp={world.size}", "training.global_batch=8", f"training.progress_ms={progress}")
    Trainer(config, ProcessGrid(world, config.layout), RandomSamples(config)).finish()
    expected = (BACKGROUND.poll, 0.002) if progress else (None, 0.0)
    assert calls == ([expected] if world.size > 1 else [])
