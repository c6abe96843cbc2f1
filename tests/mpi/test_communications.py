"""Tests that the communications of a real training step are those that ``layout.communications`` plans."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import DefaultDict, Dict, List, Optional, Sequence, Tuple

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.layout.batch import batch_sizes
from fugaku_gpt.layout.communications import Collective, Communication, is_calibration_step, plan_of, program
from fugaku_gpt.layout.nodes import node_groups
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.cases import MEANINGS
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

Call = Tuple[str, int, Optional[int]]  # operation, elements, the other rank of a message
Calls = Dict[str, List[Call]]  # by communicator
STEPS = 4  # nothing overlaps in the second and the third
RAMPS = (
    "training.ramp_start=4 training.ramp_increment=4 training.ramp_samples=5 "
    "training.seq_ramp_start=8 training.seq_ramp_increment=16 training.seq_ramp_iterations=2"
)
BY_NODES = "layout.hierarchical_sum=true node.ranks_per_node=2"
CHECKSUMS = "training.checksum_interval=2"
# dp, tp, pp and further settings
LAYOUTS: List[Tuple[int, int, int, str]] = [
    (1, 1, 1, "layout.zero=1"),
    (2, 1, 1, "layout.zero=0"),
    (2, 1, 1, "layout.zero=1 training.dtype=bfloat16"),
    (1, 2, 1, "training.recompute=full training.micro_batch=2"),
    (1, 2, 1, "layout.sequence_parallel=true training.recompute=selective training.micro_batch=2"),
    (1, 2, 1, " ".join(MEANINGS["llama"])),
    (1, 2, 1, f"layout.sequence_parallel=true {' '.join(MEANINGS['llama'])}"),
    (1, 2, 1, f"layout.sequence_parallel=true {' '.join(MEANINGS['llama'])} model.kv_heads=1"),
    (1, 4, 1, "model.biases=qkv model.kv_heads=2 training.bucket_mib=1"),
    (2, 2, 1, "layout.zero=1 model.kv_heads=1"),
    (1, 1, 2, f"layout.schedule=zero_bubble {' '.join(MEANINGS['llama'])}"),
    (1, 1, 2, "layout.schedule=gpipe layout.split=[3,1]"),
    (1, 1, 2, "layout.schedule=interleaved layout.chunks=2"),
    (4, 1, 1, f"layout.zero=1 {RAMPS}"),
    (4, 1, 1, f"layout.zero=1 {BY_NODES}"),
    (4, 1, 1, f"layout.zero=0 {BY_NODES} job.rank_map=bynode"),
    (2, 2, 1, f"{BY_NODES} layout.order=tp,pp,dp"),  # each replica on another node
    (2, 2, 1, "layout.zero=1 layout.sequence_parallel=true training.recompute=full training.micro_batch=2"),
    (
        1,
        2,
        2,
        "layout.sequence_parallel=true training.recompute=full training.recompute_layers=1 training.micro_batch=2",
    ),
    (2, 1, 2, "layout.zero=1 layout.schedule=interleaved layout.chunks=2 layout.order=dp,pp,tp"),
    (1, 1, 4, "layout.schedule=1f1b training.dtype=float64"),
    (1, 2, 1, "data.document_mask=true layout.sequence_parallel=true training.micro_batch=2"),
    (1, 1, 2, "data.document_mask=true data.loss_across_documents=true"),
    (2, 2, 2, "layout.zero=1 layout.sequence_parallel=true training.recompute=full layout.order=pp,tp,dp"),
    (2, 2, 2, "layout.zero=0 layout.schedule=interleaved layout.chunks=2 training.recompute=selective"),
    (2, 2, 2, f"layout.sequence_parallel=true {RAMPS}"),
    (4, 1, 2, f"layout.zero=1 layout.order=dp,tp,pp {BY_NODES} training.bucket_mib=0.1 {RAMPS}"),
    (4, 1, 2, f"layout.zero=0 layout.order=pp,dp,tp {BY_NODES} job.rank_map=bynode"),
    (2, 1, 4, "layout.schedule=gpipe layout.zero=1 training.gradient_dtype=bfloat16"),
    (1, 2, 1, f"layout.sequence_parallel=true model.kv_heads=1 {CHECKSUMS}"),
    (2, 1, 1, f"layout.zero=1 training.dtype=bfloat16 {CHECKSUMS}"),
    (2, 2, 1, f"layout.zero=0 model.kv_heads=1 {CHECKSUMS}"),
    (1, 1, 4, f"layout.schedule=1f1b {CHECKSUMS}"),
    (4, 1, 2, f"layout.zero=1 {BY_NODES} {CHECKSUMS}"),
    (2, 2, 2, f"layout.zero=1 layout.sequence_parallel=true {CHECKSUMS}"),
]


class Recording(Communicator):
    """A communicator that records the calls on it and on those split off from it, all in one mapping."""

    def __init__(self, communicator: Communicator, calls: DefaultDict[str, List[Call]]) -> None:
        super().__init__(communicator._handle, communicator.name, shares_cores=True)
        self._calls = calls

    def split(self, color: Optional[int], key: int, name: str) -> Communicator:
        communicator = super().split(color, key, name)
        return Recording(communicator, self._calls)

    def _enter(
        self, operation: str, tensor: Optional[torch.Tensor], blocking: bool = True, peer: Optional[int] = None
    ) -> int:
        self._calls[self.name].append((operation, tensor.numel() if tensor is not None else 0, peer))
        return super()._enter(operation, tensor, blocking, peer)


def calls_of(steps: Sequence[Communication]) -> Calls:
    """Returns the calls of a program as they are recorded; an exchange posts its receives first."""
    calls: DefaultDict[str, List[Call]] = defaultdict(list)
    for step in steps:
        if isinstance(step, Collective):
            calls[step.communicator].append((step.operation, step.elements, None))
        else:
            calls["pp"] += [(RECEIVE, step.elements, message.peer) for message in step.exchange.receives]
            calls["pp"] += [(SEND, step.elements, message.peer) for message in step.exchange.sends]
    return calls


def assert_same(recorded: Calls, planned: Calls) -> None:
    """Asserts that recorded and planned calls are the same on every communicator; else shows where they differ."""
    assert set(recorded) == set(planned)
    for name, calls in planned.items():
        for position, (call, expected) in enumerate(zip(recorded[name], calls)):
            assert call == expected, f"{name}, position {position}: did {call}, the plan says {expected}"
        assert len(recorded[name]) == len(calls), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp{layout[0]}-tp{layout[1]}-pp{layout[2]}-{layout[3]}")
def test_a_step_makes_the_calls_of_the_plan(world: Communicator, layout: Tuple[int, int, int, str]) -> None:
    dp, tp, pp, more = layout
    if dp * tp * pp != world.size:
        pytest.skip("another number of ranks")
    settings = [
        f"layout.dp={dp}",
        f"layout.tp={tp}",
        f"layout.pp={pp}",
        f"model.layers={2 if pp == 1 else 4}",
        *more.split(),
    ]
    settings += [f"training.iterations={STEPS}", f"job.nodes={world.size // 2 if BY_NODES in more else 1}"]
    config = tiny_config(*settings)
    plan = plan_of(config)
    node = plan.nodes.node_of(world.rank) if plan.nodes is not None else None
    recorded: DefaultDict[str, List[Call]] = defaultdict(list)
    grid = ProcessGrid(Recording(world, recorded), config.layout, node, config.kv_copies)
    trainer = Trainer(config, grid, ByteSamples(config.model.seq_len))
    recorded.clear()  # the calls of the set-up
    sizes = []
    for _ in range(STEPS):
        step = trainer.step()
        sizes.append((step.samples, step.seq_len))
    trainer.finish()
    assert list(dict.fromkeys([*sizes, (config.training.global_batch, config.model.seq_len)])) == batch_sizes(config)
    on_node = 1
    if plan.nodes is not None:
        on_node = len(node_groups(grid.coordinates, config.layout, config.layout.order, plan.nodes)[0])
    planned: List[Communication] = []
    for number, (samples, seq_len) in enumerate(sizes):
        of_size = replace(plan, micro_batches=samples // (config.training.micro_batch * dp), seq_len=seq_len)
        has_checksums = CHECKSUMS in more and number % 2 == 1
        planned += program(of_size, grid.coordinates.pp, on_node, is_calibration_step(number), has_checksums)
    assert_same(recorded, calls_of(planned))
    assert sum(map(len, recorded.values())) > 0 or world.size == 1
