"""Tests of how layers are split into stages: none lost, none empty, and no split has a less busy busiest stage."""

from __future__ import annotations

import itertools
import math
from typing import List, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import LayoutConfig, ModelConfig
from fugaku_gpt.formulas.flops import exact_flops
from fugaku_gpt.layout.communications import CommunicationPlan, chunk_times
from fugaku_gpt.layout.stages import Chunk, Work, chunk_tensors, chunks_of, split_layers, stage_tensors, work_of
from fugaku_gpt.layout.tensors import model_tensors
from tests.support.tiny import tiny_config

works = st.builds(Work, embedding=st.floats(0, 3), head=st.floats(0, 5))


def stage_works(chunks: Sequence[Chunk], stages: int, work: Work) -> List[float]:
    """Returns the work of each stage, in layers."""
    totals = [0.0] * stages
    for chunk in chunks:
        totals[chunk.stage] += len(chunk.layers) + work.embedding * chunk.has_embedding + work.head * chunk.has_head
    return totals


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), works)
def test_chunks_tile_the_layers_in_the_interleaved_order(layers: int, stages: int, chunks: int, work: Work) -> None:
    if stages * chunks > layers:
        with pytest.raises(ValueError, match=f"valid: stages \\* chunks up to {layers}"):
            split_layers(layers, stages, chunks, work)
        return
    model_chunks = split_layers(layers, stages, chunks, work)
    assert [layer for chunk in model_chunks for layer in chunk.layers] == list(range(layers))
    assert [(chunk.index, chunk.stage) for chunk in model_chunks] == [
        (c * stages + s, s) for c in range(chunks) for s in range(stages)
    ]
    assert all(len(chunk.layers) for chunk in model_chunks)
    assert [chunk.index for chunk in model_chunks if chunk.has_embedding] == [0]
    assert [chunk.index for chunk in model_chunks if chunk.has_head] == [stages * chunks - 1]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), works)
def test_no_split_has_less_work_on_the_busiest_stages(layers: int, stages: int, work: Work) -> None:
    if stages > layers:
        return
    # all splits, by brute force: their stages from the busiest down
    best = min(
        sorted(stage_works(split_layers(layers, stages, work=work, split=split), stages, work), reverse=True)
        for split in itertools.product(range(1, layers + 1), repeat=stages)
        if sum(split) == layers
    )
    ours = sorted(stage_works(split_layers(layers, stages, work=work), stages, work), reverse=True)
    assert ours == pytest.approx(best, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.sampled_from([(1, 2), (2, 2), (1, 3), (2, 1), (3, 2)]), works)
def test_chunks_of_a_stage_are_even_too(layers: int, shape: Sequence[int], work: Work) -> None:
    stages, chunks = shape
    if stages * chunks > layers:
        return
    model_chunks = split_layers(layers, stages, chunks, work)
    busiest = max(stage_works(model_chunks, stages, work))
    for split in itertools.product(range(1, layers + 1), repeat=stages * chunks):
        if sum(split) == layers:
            assert busiest <= max(stage_works(split_layers(layers, stages, chunks, work, split), stages, work)) + 1e-9
    for stage in range(stages):
        sizes = [
            len(chunk.layers)
            for chunk in model_chunks
            if chunk.stage == stage and not chunk.has_head | chunk.has_embedding
        ]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_the_odd_layers_of_equal_stages_go_to_the_later_stages() -> None:
    assert [len(chunk.layers) for chunk in split_layers(10, 4)] == [2, 2, 3, 3]


def test_the_logits_of_the_largest_run_are_three_quarters_of_a_layer() -> None:
    model = ModelConfig(layers=40, hidden=5184, heads=36, seq_len=2048, vocab_size=50257)
    work = work_of(model, model.padded_vocab(6))
    assert work.head == pytest.approx(0.7645, abs=1e-4)
    assert 0 < work.embedding < 1e-4
    assert [len(chunk.layers) for chunk in split_layers(40, 8, work=work)] == [5] * 8
    assert [len(chunk.layers) for chunk in split_layers(39, 8, work=work)] == [5, 5, 5, 5, 5, 5, 5, 4]


def test_work_of_layers_and_logits_adds_up_to_the_formula_of_flops() -> None:
    model = ModelConfig(layers=7, hidden=48, heads=4, seq_len=96, vocab_size=500, ffn_hidden=100)
    work = work_of(model, 512)
    without_logits = exact_flops(model, 3, padded_vocab=0)
    with_logits = exact_flops(model, 3, padded_vocab=512)
    assert with_logits / without_logits == pytest.approx((7 + work.head) / 7)
    recomputing = work_of(model, 512, recompute="full")
    assert recomputing.head == pytest.approx(work.head * 3 / 4)
    assert recomputing.head < work_of(model, 512, recompute="selective").head == work.head
    with pytest.raises(ValueError, match="valid: none, selective, full"):
        work_of(model, 512, recompute="some")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_products_with_copies_of_heads_are_work_of_each_rank(tp: int, kv_heads: int) -> None:
    model = ModelConfig(layers=7, hidden=48, heads=8, kv_heads=kv_heads, head_dim=6, seq_len=96, vocab_size=500)
    matrices = [
        spec for spec in model_tensors(model, tp) if spec.name.startswith("blocks.0.") and spec.init == "normal"
    ]
    of_rank = sum(math.prod(spec.local_shape(tp)) for spec in matrices)
    assert model.computed_layer_weights(tp) == tp * of_rank
    layer = 3.0 * (of_rank + 2.0 * model.seq_len * model.query_width / tp)
    assert work_of(model, 512, tp=tp).head == pytest.approx(3.0 * 512 / tp * model.hidden / layer)
    plan = CommunicationPlan(model, LayoutConfig(tp=tp), micro_batches=1)
    assert chunk_times(plan).weights[0] == pytest.approx(7 * of_rank / (layer / 3.0))


def test_a_given_split_is_followed() -> None:
    model_chunks = split_layers(12, 2, 2, split=[3, 4, 4, 1])
    assert [list(chunk.layers) for chunk in model_chunks] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11]]
    assert [chunk.stage for chunk in model_chunks] == [0, 1, 0, 1]
    *_, head = split_layers(12, 2, 2, split=[3, 3, 6, 0])
    assert head.has_head and list(head.layers) == []


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([6, 6], "has 2 numbers; valid: 4"),
        ([3, 4, 4, 2], "add up to 12 layers, not 13"),
        ([6, 0, 4, 2], "1 or more"),
        ([14, -2, -1, 1], "1 or more"),
        ([4, 4, 5, -1], "0 or more"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split: List[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_layers(12, 4, split=split)


@pytest.mark.parametrize(("stages", "chunks"), [(0, 1), (1, 0), (-1, 2)])
def test_no_stages_or_chunks_are_refused(stages: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="valid: 1 or more"):
        split_layers(4, stages, chunks)


@given(st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_stages_hold_every_tensor_once_except_the_tied_embedding(stages: int, chunks: int, norm: bool) -> None:
    model = ModelConfig(layers=12, hidden=16, heads=4, vocab_size=100, embedding_layernorm=norm)
    model_chunks = split_layers(12, stages, chunks)
    names = [spec.name for stage in range(stages) for spec in stage_tensors(model, 2, model_chunks, stage)]
    tied = ["token_embedding.weight"] if stages > 1 else []
    assert sorted(names) == sorted([spec.name for spec in model_tensors(model, 2)] + tied)
    by_layer = [spec.name for spec in chunk_tensors(model, 2, split_layers(12, 12)[1])]
    assert by_layer and all(name.startswith("blocks.1.") for name in by_layer)


def test_layers_are_balanced_by_the_work_of_a_run_that_recomputes_all_of_them() -> None:
    """The layers that a budget or a number recomputes follow from the split, so they do not count in it."""

    def counts(*settings: str) -> "list[int]":
        usual = ["model.layers=7", "layout.pp=2", "model.vocab_size=2048"]
        return [len(chunk.layers) for chunk in chunks_of(tiny_config(*usual, *settings))]

    assert counts() == [6, 1] and counts("training.recompute=full") == [5, 2]
    assert counts("training.recompute=full", "training.recompute_layers=1") == [6, 1]
    assert counts("training.recompute=full", "training.recompute_budget_mib=100") == [6, 1]
