"""Tests that the dropout mask depends only on seed, site and the positions of the elements."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import load_run_config
from fugaku_gpt.model.attention import CausalSelfAttention
from fugaku_gpt.model.dropout import KeyedDropout, keep_mask
from fugaku_gpt.parallel.sequence import Shard


@settings(deadline=None)
@given(
    first=st.integers(0, 1000) | st.integers(0, 2**66),
    count=st.integers(1, 500),
    skip=st.integers(0, 400),
    site=st.integers(0, 300),
)
def test_a_slice_of_the_mask_is_the_mask_of_the_slice(first: int, count: int, skip: int, site: int) -> None:
    full_mask = keep_mask(7, site, first, skip + count, 0.3)
    assert np.array_equal(full_mask[skip:], keep_mask(7, site, first + skip, count, 0.3))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_probability(probability: float) -> None:
    assert 1 - keep_mask(1, 2, 0, 400_000, probability).mean() == pytest.approx(probability, abs=4e-3)


def test_the_mask_is_the_same_on_every_numpy_and_machine() -> None:
    digest = hashlib.sha256(np.packbits(keep_mask(1234, 5, 12345, 4096, 0.1)).tobytes()).hexdigest()
    assert digest == "fc1ff5a03ecb2154c37a36299385e1d50c6d9c77ad2704e32ad4fabd81fd102c"


def test_other_seeds_and_sites_drop_other_elements() -> None:
    masks = [keep_mask(seed, site, 0, 1000, 0.5) for seed, site in ((1, 1), (1, 2), (2, 1))]
    for i in range(3):
        assert 350 < int((masks[i] != masks[i - 1]).sum()) < 650


def test_samples_of_a_batch_keep_their_masks_in_any_micro_batch() -> None:
    dropout = KeyedDropout(0.4, seed=3, site=9)
    x = torch.ones(6, 5, 8, dtype=torch.float64)
    full_batch = dropout(x, 10)
    micro_batches = torch.cat([dropout(x[:2], 10), dropout(x[2:3], 12), dropout(x[3:], 13)])
    assert torch.equal(full_batch, micro_batches)
    assert set(full_batch.reshape(-1).tolist()) == {0.0, 65536 / (65536 - round(0.4 * 65536))}


@pytest.mark.parametrize("shards", [2, 5])
def test_the_shards_of_sequences_draw_their_slices_of_the_mask(shards: int) -> None:
    x = torch.ones(3, 10, 8, dtype=torch.float64)
    full_output = KeyedDropout(0.4, seed=3, site=9)(x, 10)
    for index in range(shards):
        shard = Shard(index, shards)
        positions = shard.positions(10)
        assert torch.equal(KeyedDropout(0.4, 3, 9, shard)(x[:, positions].contiguous(), 10), full_output[:, positions])


def test_nothing_is_dropped_in_evaluation_or_at_probability_zero() -> None:
    x = torch.ones(1, 4, 4)
    dropout = KeyedDropout(0.5, seed=1, site=1)
    assert not torch.equal(dropout(x, 0), x)
    assert dropout.eval()(x, 0) is x
    assert KeyedDropout(0.0, seed=1, site=1)(x, 0) is x


def test_attention_dropout_depends_on_the_head_s_number_in_the_full_model() -> None:
    model = load_run_config(preset="tiny", overrides=["model.attention_dropout=0.3", "model.seq_len=10"]).model

    def keep_flags(rank: int, size: int) -> torch.Tensor:
        tp = Communicator.alone()
        tp.rank, tp.size = rank, size
        layer = CausalSelfAttention(model, tp, torch.float32, seed=5, site=2)
        return layer._keep_flags(2, 10, 7)

    halves = torch.cat([keep_flags(0, 2), keep_flags(1, 2)], dim=1)
    assert torch.equal(halves, keep_flags(0, 1))
