"""Tests that no part of the model reads parameters before they have arrived from other replicas."""

from __future__ import annotations

from typing import Any, Callable, List

import pytest
import torch

from fugaku_gpt.comm import BACKGROUND, Communicator
from fugaku_gpt.layout.stages import split_layers, stage_tensors
from fugaku_gpt.model import build_stage, named_parameters
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.overlap import Overlap
from fugaku_gpt.parallel.parameter_gather import ParameterGather
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

SHARDS = 2


class Arrival:
    """An all-gather that delivers nothing before it is waited for."""

    def __init__(self, arrive: Callable[[], Any]) -> None:
        self._arrive = arrive

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._arrive()


class DelayedGroup(Communicator):
    """Replicas whose shards arrive as late as possible; until then the buffer holds NaN."""

    def start_all_gather(self, tensor: torch.Tensor) -> Any:
        gathered = tensor.clone()
        tensor.fill_(float("nan"))
        return Arrival(lambda: tensor.copy_(gathered))


@pytest.mark.parametrize("stages", [1, 2])
def test_every_layer_waits_for_the_parameters_that_it_reads(stages: int) -> None:
    config = tiny_config("model.layers=4", "training.bucket_mib=0.001")
    chunks = split_layers(4, stages)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    x: torch.Tensor = tokens[:, :-1]
    for stage in range(stages):
        pieces = build_stage(config, Communicator.alone(), [chunks[stage]])
        specs = stage_tensors(config.model, 1, chunks, stage)
        buffers = FlatBuffers(named_parameters(pieces), specs, SHARDS, int(config.training.bucket_mib * 2**20))
        gather = ParameterGather(buffers, pieces, DelayedGroup.alone(), Overlap(Communicator.alone(), True))
        outputs: List[torch.Tensor] = []
        with torch.no_grad():
            for is_delayed in (False, True):
                if is_delayed:
                    gather.start()
                outputs.append(pieces[0](x, tokens[:, 1:], 0))
        assert len(buffers.buckets) > 4 and torch.isfinite(outputs[0]).all()
        assert torch.equal(*outputs)
        x = outputs[0]


def test_gather_time_that_is_polled_inside_kernels_counts_as_exposed() -> None:
    config, chunks = tiny_config("training.bucket_mib=0.001"), split_layers(tiny_config().model.layers, 1)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    pieces = build_stage(config, Communicator.alone(), chunks)
    specs = stage_tensors(config.model, 1, chunks, 0)
    buffers = FlatBuffers(named_parameters(pieces), specs, SHARDS, int(config.training.bucket_mib * 2**20))
    overlap = Overlap(Communicator.alone(), True)
    gather = ParameterGather(buffers, pieces, DelayedGroup.alone(), overlap)
    BACKGROUND._seconds += 1e6  # of other communication
    gather.start()
    BACKGROUND._seconds += 1e3
    with torch.no_grad():
        pieces[0](tokens[:, :-1], tokens[:, 1:], 0)
    assert overlap.gathers is not None and 1e3 < overlap.gathers.exposed_seconds < 2e3
