"""Tests of which rank has which tokens under sequence parallelism, and in which order; ``tests/mpi`` tests the rest."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.comm import Communicator
from fugaku_gpt.parallel.sequence import UNSHARDED, Shard, gather, scatter

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))  # samples, shards, tokens of each shard


@given(sizes)
def test_the_shards_tile_the_sequence(size: "tuple[int, int, int]") -> None:
    _, shards, length = size
    positions = [
        position
        for index in range(shards)
        for position in range(shards * length)[_shard_positions(index, shards, length)]
    ]
    assert positions == list(range(shards * length))


def _shard_positions(index: int, shards: int, length: int) -> slice:
    return Shard(index, shards).positions(shards * length)


@given(sizes)
def test_rank_order_is_the_order_of_gathered_shards(size: "tuple[int, int, int]") -> None:
    b, shards, length = size
    tokens = torch.arange(b * shards * length).view(b, shards * length)
    shard = Shard(0, shards)
    gathered = torch.cat([tokens[:, _shard_positions(index, shards, length)] for index in range(shards)])
    assert torch.equal(shard.to_rank_order(tokens), gathered)
    assert torch.equal(shard.to_sample_order(gathered), tokens)
    assert torch.equal(shard.to_sample_order(gathered.unsqueeze(-1)), tokens.unsqueeze(-1))


def test_without_sequence_parallelism_or_on_a_single_rank_all_tokens_are_in_order() -> None:
    tp = Communicator.alone()
    assert Shard.of(tp, False) == Shard.of(tp, True) == UNSHARDED
    tokens = torch.arange(12).view(3, 4)
    assert torch.equal(UNSHARDED.to_rank_order(tokens), tokens) and UNSHARDED.positions(4) == slice(0, 4)
    assert torch.equal(gather(tokens, tp), tokens) and torch.equal(scatter(tokens, tp), tokens)
    tp.rank, tp.size = 2, 4
    assert Shard.of(tp, True) == Shard(2, 4) and Shard.of(tp, False) == UNSHARDED
