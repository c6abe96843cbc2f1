"""Tests of checksums over what ranks hold alike: a flipped bit is found and its rank named, and nothing else is."""

from __future__ import annotations

import socket
from typing import List, NamedTuple, Tuple

import numpy as np
import pytest

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.comm.sums import array_of
from fugaku_gpt.errors import ReplicasDiffer
from fugaku_gpt.layout.grid import Coordinates, rank_of
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

SP = "layout.sequence_parallel=true"


class Flip(NamedTuple):
    """A bit that flips, and the ranks that the error must name.

    Attributes:
        tensor: a part of the tensor's name.
        at: coordinates (dp, pp, tp) of the rank.
        suspects: of the ranks that the error names as having other bits; empty: that of ``at`` alone.
    """

    tensor: str
    at: Tuple[int, int, int]
    suspects: Tuple[Tuple[int, int, int], ...] = ()


# dp, tp, pp, further settings, and a flip
CASES: List[Tuple[int, int, int, str, Flip]] = [
    (2, 1, 1, "layout.zero=0", Flip("mlp", (1, 0, 0), ((0, 0, 0), (1, 0, 0)))),
    (2, 1, 1, "layout.zero=1 training.dtype=bfloat16", Flip("token_embedding", (0, 0, 0), ((0, 0, 0), (1, 0, 0)))),
    (1, 2, 1, SP, Flip("final_norm", (0, 0, 1), ((0, 0, 0), (0, 0, 1)))),
    (1, 1, 2, "", Flip("token_embedding", (0, 1, 0), ((0, 0, 0), (0, 1, 0)))),
    (4, 1, 1, "layout.zero=1", Flip("final_norm", (2, 0, 0))),
    (4, 1, 1, "layout.zero=0 training.dtype=bfloat16", Flip("attention", (3, 0, 0))),
    (4, 1, 1, "layout.zero=0 layout.hierarchical_sum=true node.ranks_per_node=2", Flip("mlp", (0, 0, 0))),
    (2, 2, 1, f"layout.zero=0 {SP}", Flip("final_norm", (1, 0, 1))),  # two pairs differ, and have this rank in common
    (2, 2, 1, "layout.zero=1 model.kv_heads=1", Flip(".kv", (0, 0, 1))),
    (2, 2, 1, "layout.zero=0", Flip("mlp", (1, 0, 0), ((0, 0, 0), (1, 0, 0)))),
    (2, 1, 2, "layout.zero=1", Flip("token_embedding", (1, 1, 0))),
    (4, 1, 2, "layout.zero=0", Flip("mlp", (3, 1, 0))),
    (4, 2, 1, f"layout.zero=0 {SP}", Flip("final_norm", (2, 0, 1))),
    (2, 2, 2, f"layout.zero=1 {SP} model.kv_heads=1", Flip("token_embedding", (1, 0, 1))),
    (8, 1, 1, "layout.zero=1 training.gradient_dtype=bfloat16", Flip("attention", (7, 0, 0))),
]


def trainer(world: Communicator, dp: int, tp: int, pp: int, more: str) -> Trainer:
    settings = [f"layout.dp={dp}", f"layout.tp={tp}", f"layout.pp={pp}", *more.split()]
    settings.append(f"job.nodes={world.size // 2 if 'hierarchical' in more else 1}")
    config = tiny_config(*settings)
    grid = ProcessGrid(world, config.layout, None, config.kv_copies)
    return Trainer(config, grid, ByteSamples(config.model.seq_len))


def flip_bit(run: Trainer, tensor: str) -> str:
    """Flip the lowest bit of an element of the first tensor that has this in its name; returns its whole name."""
    placed = next(placed for placed in run.buffers.placements if tensor in placed.spec.name)
    parameters = run.buffers.parameters
    array_of(parameters).view(np.uint8)[(placed.start + placed.size // 2) * parameters.element_size()] ^= 1
    return placed.spec.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"dp{case[0]}-tp{case[1]}-pp{case[2]}-{case[3]}")
def test_a_flipped_bit_ends_the_run_and_names_the_rank(
    world: Communicator, case: Tuple[int, int, int, str, Flip]
) -> None:
    dp, tp, pp, more, flip = case
    if dp * tp * pp != world.size:
        pytest.skip("another number of ranks")
    run = trainer(world, dp, tp, pp, f"{more} training.checksum_interval=2")
    for _ in range(7):
        run.step()  # compares three times, and finds nothing
    layout, host = run.config.layout, socket.gethostname()
    culprit = rank_of(Coordinates(*flip.at), layout, layout.order)
    flipped = flip_bit(run, flip.tensor) if world.rank == culprit else ""
    (tensor,) = filter(None, world.broadcast_json(world.gather_json(flipped)))
    with pytest.raises(ReplicasDiffer) as caught:
        run.step()
    suspects = sorted(rank_of(Coordinates(*at), layout, layout.order) for at in flip.suspects) or [culprit]
    message, who = str(caught.value), ", ".join(f"{rank} on {host}" for rank in suspects)
    assert f"iteration 8: silent corruption: rank{'s' if len(suspects) > 1 else ''} {who} held" in message
    assert f" bits of {tensor}" in message and "no rank differed in iteration 6" in message
    assert (caught.value.rank, caught.value.node) == ((culprit, host) if suspects == [culprit] else (None, ""))
    assert ("no majority shows which are right" in message) == (suspects != [culprit])


def test_a_bit_that_flips_between_comparisons_ends_the_run_at_the_next(world: Communicator) -> None:
    if world.size != 4:
        pytest.skip("four ranks are what it takes")
    run = trainer(world, 4, 1, 1, "layout.zero=0 training.checksum_interval=3")
    for _ in range(3):
        run.step()
    if world.rank == 1:
        flip_bit(run, "mlp")
    run.step()
    run.step()
    with pytest.raises(ReplicasDiffer, match="rank 1 on .* than ranks 0, 2, 3; "):
        run.step()


def test_a_run_without_an_interval_compares_nothing(world: Communicator) -> None:
    run = trainer(world, world.size, 1, 1, "")
    flip_bit(run, "mlp")
    for _ in range(2):
        run.step()
