"""Who holds which tokens under sequence parallelism, and in what order; the rest is held equal by ``tests/mpi``."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.comm import Communicator
from fugaku_gpt.parallel.sequence import UNSHARDED, Shard, gather, scatter

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))  # samples, parts, tokens of each part


@given(sizes)
def test_the_parts_tile_the_sequence(size: "tuple[int, int, int]") -> None:
    _, parts, here = size
    positions = [position for index in range(parts) for position in range(parts * here)[_part(index, parts, here)]]
    assert positions == list(range(parts * here))


def _part(index: int, parts: int, here: int) -> slice:
    return Shard(index, parts).positions(parts * here)


@given(sizes)
def test_the_order_of_ranks_is_what_gathering_the_parts_gives(size: "tuple[int, int, int]") -> None:
    b, parts, here = size
    tokens = torch.arange(b * parts * here).view(b, parts * here)
    shard = Shard(0, parts)
    gathered = torch.cat([tokens[:, _part(index, parts, here)] for index in range(parts)])
    assert torch.equal(shard.to_rank_order(tokens), gathered)
    assert torch.equal(shard.to_sample_order(gathered), tokens)
    assert torch.equal(shard.to_sample_order(gathered.unsqueeze(-1)), tokens.unsqueeze(-1))


def test_without_it_or_on_one_rank_everything_is_here_in_order() -> None:
    tp = Communicator.alone()
    assert Shard.of(tp, False) == Shard.of(tp, True) == UNSHARDED
    tokens = torch.arange(12).view(3, 4)
    assert torch.equal(UNSHARDED.to_rank_order(tokens), tokens) and UNSHARDED.positions(4) == slice(0, 4)
    assert torch.equal(gather(tokens, tp), tokens) and torch.equal(scatter(tokens, tp), tokens)
    tp.rank, tp.size = 2, 4
    assert Shard.of(tp, True) == Shard(2, 4) and Shard.of(tp, False) == UNSHARDED
