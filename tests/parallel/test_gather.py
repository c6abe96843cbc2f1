"""No part of the model reads parameters that are still on their way from other replicas."""

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
    """A gathering that brings nothing before it is waited for."""

    def __init__(self, arrive: Callable[[], Any]) -> None:
        self._arrive = arrive

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._arrive()


class LateGroup(Communicator):
    """Replicas whose shares come as late as they may; until then there is nothing to compute with."""

    def start_all_gather(self, tensor: torch.Tensor) -> Any:
        whole = tensor.clone()
        tensor.fill_(float("nan"))
        return Arrival(lambda: tensor.copy_(whole))


@pytest.mark.parametrize("stages", [1, 2])
def test_every_part_waits_for_what_it_reads(stages: int) -> None:
    config = tiny_config("model.layers=4", "training.bucket_mib=0.001")
    chunks = split_layers(4, stages)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    x: torch.Tensor = tokens[:, :-1]
    for stage in range(stages):
        pieces = build_stage(config, Communicator.alone(), [chunks[stage]])
        specs = stage_tensors(config.model, 1, chunks, stage)
        buffers = FlatBuffers(named_parameters(pieces), specs, SHARDS, int(config.training.bucket_mib * 2**20))
        gather = ParameterGather(buffers, pieces, LateGroup.alone(), Overlap(Communicator.alone(), True))
        outputs: List[torch.Tensor] = []
        with torch.no_grad():
            for late in (False, True):
                if late:
                    gather.start()
                outputs.append(pieces[0](x, tokens[:, 1:], 0))
        assert len(buffers.buckets) > 4 and torch.isfinite(outputs[0]).all()
        assert torch.equal(*outputs)
        x = outputs[0]


def test_what_kernels_let_mpi_get_on_with_meanwhile_is_exposed_too() -> None:
    config, chunks = tiny_config("training.bucket_mib=0.001"), split_layers(tiny_config().model.layers, 1)
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 2))
    pieces = build_stage(config, Communicator.alone(), chunks)
    specs = stage_tensors(config.model, 1, chunks, 0)
    buffers = FlatBuffers(named_parameters(pieces), specs, SHARDS, int(config.training.bucket_mib * 2**20))
    overlap = Overlap(Communicator.alone(), True)
    gather = ParameterGather(buffers, pieces, LateGroup.alone(), overlap)
    BACKGROUND._seconds += 1e6  # of other things
    gather.start()
    BACKGROUND._seconds += 1e3
    with torch.no_grad():
        pieces[0](tokens[:, :-1], tokens[:, 1:], 0)
    assert overlap.gathers is not None and 1e3 < overlap.gathers.exposed_seconds < 2e3
