"""Tests of where tensors lie in the flat parameters, and of how those are cut into buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.layout.flat import flat_layout, is_sharded, shards_of
from fugaku_gpt.layout.stages import split_layers, stage_tensors
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, model_tensors

MODEL = ModelConfig(layers=6, hidden=24, heads=4, seq_len=12, vocab_size=104, vocab_multiple=8)


def test_without_gaps_the_elements_are_the_parameters() -> None:
    assert flat_layout(model_tensors(MODEL, 1), 1, 1, 64, 64, 2**20).elements == parameter_count(MODEL)


@pytest.mark.slow
@given(st.sampled_from([1, 2, 4]), st.integers(1, 7), st.sampled_from([2, 4, 8]), st.integers(1, 2**16))
def test_buckets_cover_all_and_divide_by_the_shards(tp: int, shards: int, item: int, bucket_bytes: int) -> None:
    layout = flat_layout(model_tensors(MODEL, tp), tp, shards, item, max(4, item), bucket_bytes)
    assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.stop for bucket in layout.buckets[:-1])]
    assert layout.buckets[-1].stop == layout.elements
    assert all((bucket.stop - bucket.start) % (shards * 64 // item) == 0 for bucket in layout.buckets)
    ends = [tensor.start + tensor.size for tensor in layout.placed]
    assert all(end <= tensor.start for end, tensor in zip(ends, layout.placed[1:])) and ends[-1] <= layout.elements
    assert all(tensor.start * item % 64 == 0 for tensor in layout.placed)


def test_no_bucket_is_larger_than_a_communication_can_be() -> None:
    large = ModelConfig(layers=1, hidden=2**15, heads=4)
    layout = flat_layout(model_tensors(large, 1), 1, 3, 4, 4, bucket_bytes=2**40)
    assert layout.elements > 2**33 and max(bucket.stop - bucket.start for bucket in layout.buckets) < 2**31


@pytest.mark.parametrize("shards", [1, 3, 4])
@pytest.mark.parametrize("stages", [2, 3])
def test_both_ends_of_a_pipeline_cut_the_embedding_alike(stages: int, shards: int) -> None:
    chunks = split_layers(MODEL.layers, stages)
    cuts = []
    for stage in (0, stages - 1):
        layout = flat_layout(stage_tensors(MODEL, 1, chunks, stage), 1, shards, 4, 4, 1000)
        start = layout.embedding.start
        assert layout.placed[-1].spec.name == TOKEN_EMBEDDING and start in [bucket.start for bucket in layout.buckets]
        cuts.append([(b.start - start, b.stop - start) for b in layout.buckets if b.start >= start])
    assert cuts[0] == cuts[1] and len(cuts[0]) > 1


def test_no_bucket_has_more_elements_than_a_count_of_mpi_can_say() -> None:
    """A count is a C int: 2^31 - 1 at most."""
    large = ModelConfig(layers=2, hidden=24576, heads=4, seq_len=12, vocab_size=104)
    buckets = flat_layout(model_tensors(large, 1), 1, 1, 4, 4, 2**50).buckets
    longest = max(bucket.stop - bucket.start for bucket in buckets)
    assert 2**31 - 1024 < longest <= 2**31 - 1


@pytest.mark.parametrize(("zero", "dp", "expected"), [(0, 2, False), (1, 1, False), (1, 2, True), (1, 3, True)])
def test_replicas_share_out_the_parameters_under_zero_where_there_are_several(
    zero: int, dp: int, expected: bool
) -> None:
    config = load_run_config(overrides=[f"layout.zero={zero}", f"layout.dp={dp}", "training.global_batch=12"])
    assert is_sharded(config) == expected and shards_of(config) == (dp if expected else 1)


def test_tensors_without_an_embedding_have_none_in_the_layout() -> None:
    layers = [tensor for tensor in model_tensors(MODEL, 1) if tensor.name != TOKEN_EMBEDDING]
    assert flat_layout(layers, 1, 1, 4, 4, 2**20).embedding == slice(0, 0)
    assert flat_layout(model_tensors(MODEL, 1), 1, 1, 4, 4, 2**20).embedding != slice(0, 0)
