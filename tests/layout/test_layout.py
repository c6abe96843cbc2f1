"""Tests of coordinates of ranks, of samples that replicas read, and of slices of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config import LayoutConfig, ModelConfig, load_run_config
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.layout.batch import first_sample
from fugaku_gpt.layout.grid import coordinates_of, dp_group, rank_of, tp_group
from fugaku_gpt.layout.tensors import model_tensors

layouts = st.builds(LayoutConfig, dp=st.integers(1, 6), tp=st.integers(1, 6), pp=st.integers(1, 6))


@pytest.mark.slow
@given(layouts)
def test_ranks_map_to_distinct_coordinates(layout: LayoutConfig) -> None:
    coordinates_of_ranks = [coordinates_of(rank, layout) for rank in range(layout.ranks)]
    assert len(set(coordinates_of_ranks)) == layout.ranks
    assert [rank_of(coordinates, layout) for coordinates in coordinates_of_ranks] == list(range(layout.ranks))


@pytest.mark.slow
@given(layouts)
def test_tensor_parallel_ranks_are_neighbours_and_groups_partition_the_ranks(layout: LayoutConfig) -> None:
    for group_of in (tp_group, dp_group):
        groups = {tuple(group_of(coordinates_of(rank, layout), layout)) for rank in range(layout.ranks)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    group = tp_group(coordinates_of(layout.ranks - 1, layout), layout)
    assert group == range(layout.ranks - layout.tp, layout.ranks)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_layout_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="not in a layout of 4 ranks"):
        coordinates_of(rank, LayoutConfig(dp=2, tp=2))


@pytest.mark.slow
@given(
    dp=st.sampled_from([1, 2, 3]), micro=st.sampled_from([1, 2, 4]), steps=st.integers(1, 3), done=st.integers(0, 99)
)
def test_a_global_batch_is_read_once_in_every_layout(dp: int, micro: int, steps: int, done: int) -> None:
    batch = dp * micro * steps
    config = load_run_config(
        overrides=[f"layout.dp={dp}", f"training.micro_batch={micro}", f"training.global_batch={batch}"]
    )
    read: List[int] = []
    for replica in range(dp):
        for micro_batch in range(config.micro_batches):
            start = first_sample(config, done, micro_batch, replica)
            read += range(start, start + micro)
    assert sorted(read) == list(range(done, done + batch))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_tile_every_tensor_and_add_up_to_the_parameter_count(tp: int, kv_heads: int) -> None:
    model = ModelConfig(layers=3, hidden=16, heads=4, vocab_size=100, vocab_multiple=4, embedding_layernorm=True)
    model = replace(model, kv_heads=kv_heads)
    total = 0
    for spec in model_tensors(model, tp):
        copies, firsts = np.zeros(spec.shape, dtype=int), np.zeros(spec.shape, dtype=int)
        for rank in range(tp):
            part = spec.slice_of(rank, tp)
            copies[part] += 1
            firsts[part] += spec.is_first_copy(rank)
            assert copies[part].shape == spec.local_shape(tp)
        is_copied = ".kv." in spec.name and tp > kv_heads
        assert (copies == (tp if spec.tp_dim is None else tp // kv_heads if is_copied else 1)).all(), spec.name
        assert (firsts == 1).all(), spec.name
        total += int(np.prod((spec.rows or spec.shape[0], *spec.shape[1:])))
    assert total == parameter_count(model)
