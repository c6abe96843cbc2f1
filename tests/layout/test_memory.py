"""Tests of the memory formulas against what PyTorch saves, and of the choice of layers to recompute within a budget."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.data.random_samples import RandomGrids
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout import memory
from fugaku_gpt.layout.batch import SkippedSamples
from fugaku_gpt.layout.memory import (
    PipelineState,
    embedding_and_head_bytes,
    layer_bytes,
    peak_activation_bytes,
    pipeline_states,
    recompute_of_layers,
)
from fugaku_gpt.layout.stages import Chunk, split_layers
from fugaku_gpt.layout.tensors import model_tensors
from fugaku_gpt.model import build_model
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.gradient_path import GradientReducer
from fugaku_gpt.training.workload import TRAIN, workload_of
from tests.mpi.cases import MEANINGS
from tests.support.grids import LIKE_LLAMA
from tests.support.kept import HAS_HOOKS, counting
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

KINDS = ("none", "selective", "full")
# a classifier of grids in place of the tiny GPT
GRIDS = (
    "model.kind=grid_classifier",
    "data.kind=arc",
    "data.buckets=[5]",
    "model.seq_len=25",
    "model.tied_embeddings=false",
)


@pytest.fixture(params=[False, True], ids=["by operators", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Switches compiled kernels of attention off or on, and yields the setting that says so to the formulas."""
    if request.param and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of more, few heads are too few for the kernels
    yield f"node.compiled_kernels={request.param}"
    torch.set_num_threads(threads)


def saved_bytes(config: RunConfig) -> int:
    """Returns the bytes that PyTorch saves in the forward pass of a micro-batch, with those that the loss holds."""
    model = build_model(config, Communicator.alone()).train()
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    GradientReducer(buffers, {0: model}, ProcessGrid.alone(), sharded=False)
    samples = RandomGrids(config) if config.model.is_grid_classifier else ByteSamples(config.model.seq_len)
    workload = workload_of(config, 0, SkippedSamples(()), samples, None)
    with counting([model]) as counter:
        loss = workload.forward(model, None, TRAIN, (0, 0), config.model.seq_len)
        saved = counter.current_bytes
    gradients = loss.grad_fn.gradients
    return saved + sum(tensor.numel() * tensor.element_size() for tensor in gradients if tensor is not None)


@pytest.mark.skipif(not HAS_HOOKS, reason="this PyTorch does not show what it saves")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("training.dtype=float64", "training.micro_batch=4"),
        ("model.dropout=0",),
        ("model.attention_dropout=0",),
        ("model.embedding_layernorm=false", "model.ffn_hidden=80"),
        ("model.dropout=0", "model.attention_dropout=0", "model.seq_len=40", "model.heads=2"),
        (*MEANINGS["llama"], "model.qk_norm=false"),
        (*MEANINGS["llama"], "training.micro_batch=2"),
        (*MEANINGS["llama"], "model.kv_heads=null", "model.biases=all", "training.dtype=float64"),
        ("model.positions=rope", "model.norm=rmsnorm", "model.tied_embeddings=false"),
        ("model.mlp=swiglu", "model.qk_norm=true", "model.head_dim=4"),
        GRIDS,
        (*GRIDS, *LIKE_LLAMA, "training.micro_batch=2"),
    ],
    ids=str,
)
def test_the_formula_matches_bytes_saved_by_pytorch(kind: str, changes: Sequence[str], compiled: str) -> None:
    config = tiny_config("model.layers=3", f"training.recompute={kind}", compiled, *changes)
    (chunk,) = split_layers(3, 1)
    formula_bytes = embedding_and_head_bytes(config, chunk) + 3 * layer_bytes(config, kind)
    assert saved_bytes(config) == pytest.approx(formula_bytes, rel=1e-3)


@pytest.mark.skipif(not HAS_HOOKS, reason="this PyTorch does not show what it saves")
@pytest.mark.parametrize("forced", [False, True], ids=["as found", "in float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "model", [(), MEANINGS["llama"], (*GRIDS, "model.embedding_layernorm=false")], ids=["gpt-2", "llama", "grids"]
)
def test_the_formula_holds_in_16_bits_too(
    model: Sequence[str], kind: str, forced: bool, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators in float32 keep no copies, but for the weights of norms."""
    if forced:
        monkeypatch.setitem(RANK_CONSENSUS.in_float32, torch.bfloat16, frozenset(TRIALS))
    config = tiny_config("model.layers=3", f"training.recompute={kind}", "training.dtype=bfloat16", compiled, *model)
    (chunk,) = split_layers(3, 1)
    formula_bytes = embedding_and_head_bytes(config, chunk) + 3 * layer_bytes(config, kind)
    assert saved_bytes(config) == pytest.approx(formula_bytes, rel=1e-3)


def test_the_paper_s_layer_is_a_special_case() -> None:
    """Korthikanti et al. 2022, equation 2: s b h (10 + 24 / t + 5 a s / (h t)) bytes, where a number takes two bytes
    and an element of a mask one. We keep the same tensors but for those that we compute again: the probabilities and
    what dropout leaves of them (4 a s / (h t)), and what LayerNorms and GELU make (4 + 8 / t). The logarithms of sums
    of compiled attention come on top."""
    s, h, a, t = 32, 64, 4, 2
    config = load_run_config(
        overrides=[
            "model.layers=1",
            f"model.hidden={h}",
            f"model.heads={a}",
            f"model.seq_len={s}",
            "model.dropout=0.1",
            "model.attention_dropout=0.1",
            f"layout.tp={t}",
        ]
    )
    numbers, masks, flags = 2 * s * h + 8 * s * h // t, 2 * s * h, a * s * s // t
    assert 2 * numbers + masks + flags == s * h * (10 - 4 + (24 - 8) / t + (5 - 4) * a * s / (h * t))
    assert layer_bytes(config, "none") == 4 * (numbers + masks) + flags + 4 * a * s // t


def test_sequence_parallelism_divides_activations_outside_tp_regions() -> None:
    plain, cut = (
        load_run_config(preset="13b", overrides=["layout.tp=4", f"layout.sequence_parallel={on}"])
        for on in (False, True)
    )
    s, h = plain.model.seq_len, plain.model.hidden
    assert layer_bytes(plain, "full") == 4 * layer_bytes(cut, "full") == 4 * s * h
    saved = layer_bytes(plain, "none") - layer_bytes(cut, "none")
    assert saved == 4 * (s - s // 4) * 2 * h + (8 * h * (s - s // 4) if plain.model.dropout else 0)


def pipeline(schedule: str, pp: int, micro_batches: int, chunks: int = 1, *more: str) -> Tuple[RunConfig, List[Chunk]]:
    config = tiny_config(
        f"layout.schedule={schedule}",
        f"layout.pp={pp}",
        f"layout.chunks={chunks}",
        f"model.layers={3 * pp * chunks}",
        f"training.global_batch={micro_batches}",
        *more,
    )
    return config, list(split_layers(config.model.layers, pp, chunks))


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_later_stages_of_1f1b_hold_fewer_micro_batches(schedule: str, in_flight: List[int]) -> None:
    config, _ = pipeline(schedule, 4, 8)
    assert [max(counts[0] for counts, _, _ in pipeline_states(config, stage)) for stage in range(4)] == in_flight


def choice(config: RunConfig, chunks: Sequence[Chunk]) -> List[Dict[str, int]]:
    """Returns how many layers of each stage are recomputed in which way."""
    kinds = recompute_of_layers(config, chunks)
    layer_counts: List[Dict[str, int]] = [dict.fromkeys(KINDS, 0) for _ in range(config.layout.pp)]
    for chunk in chunks:
        for layer in chunk.layers:
            layer_counts[chunk.stage][kinds[layer]] += 1
    return layer_counts


def work(stage: Dict[str, int]) -> int:
    """Returns the cost of a stage's plan, by which plans are ordered."""
    return stage["selective"] + 10 * stage["full"]


def least(config: RunConfig, chunks: Sequence[Chunk]) -> float:
    """Returns the smallest valid budget in MiB, read from the error for one that is too small."""
    with pytest.raises(UsageError) as caught:
        recompute_of_layers(config, chunks)
    match = re.search(r"valid: ([0-9.e+]+) or more", str(caught.value))
    assert match, caught.value
    return float(match[1])


def test_with_a_budget_later_stages_recompute_less() -> None:
    """Sizes of a real model, so that a tenth of a MiB matters."""
    size = ("model.hidden=512", "model.heads=8", "model.seq_len=256", "training.recompute=full")
    _, chunks = pipeline("1f1b", 4, 8, 1, *size)
    (smallest,) = {least(*pipeline("1f1b", 4, 8, 1, *size, "training.recompute_budget_mib=0.1"))}
    config, _ = pipeline("1f1b", 4, 8, 1, *size, f"training.recompute_budget_mib={smallest}")
    plans = choice(config, chunks)
    works = [work(plan) for plan in plans]
    assert works == sorted(works, reverse=True) and works[0] > works[-1]
    assert plans[0]["full"] > 0
    with pytest.raises(UsageError, match=r"training.recompute_budget_mib: .*: stage 0 keeps .* MiB"):
        small, _ = pipeline("1f1b", 4, 8, 1, *size, f"training.recompute_budget_mib={smallest - 0.2}")
        recompute_of_layers(small, chunks)


def test_enough_memory_recomputes_nothing_and_selective_goes_no_further() -> None:
    for kind in ("selective", "full"):
        config, chunks = pipeline("1f1b", 2, 4, 1, f"training.recompute={kind}", "training.recompute_budget_mib=1000")
        assert choice(config, chunks) == [{"none": 3, "selective": 0, "full": 0}] * 2
    tight = "training.recompute_budget_mib=0.01"
    floors = [least(*pipeline("1f1b", 2, 4, 1, tight, f"training.recompute={kind}")) for kind in ("selective", "full")]
    assert floors[0] > floors[1]


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]),
    pp=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    kind=st.sampled_from(["selective", "full"]),
    share=st.floats(1.0, 3.0),
    dropout=st.booleans(),
)
def test_every_stage_fits_into_any_budget_that_is_not_refused(
    schedule: Tuple[str, int], pp: int, micro_batches: int, kind: str, share: float, dropout: bool
) -> None:
    size = ("model.hidden=128", "model.seq_len=128", f"training.recompute={kind}")
    size += () if dropout else ("model.attention_dropout=0",)
    name, chunks_per_stage = schedule
    tight, chunks = pipeline(name, pp, micro_batches, chunks_per_stage, *size, "training.recompute_budget_mib=0.01")
    with pytest.raises(UsageError) as caught:
        recompute_of_layers(tight, chunks)
    match = re.search(r"valid: ([0-9.e+]+) or more", str(caught.value))
    assert match
    budget = float(match[1]) * share
    config, _ = pipeline(name, pp, micro_batches, chunks_per_stage, *size, f"training.recompute_budget_mib={budget}")
    kinds = dict(enumerate(recompute_of_layers(config, chunks)))
    for stage in range(pp):
        stage_chunks = [chunk for chunk in chunks if chunk.stage == stage]
        assert peak_activation_bytes(config, stage_chunks, kinds, pipeline_states(config, stage)) <= budget * 2**20


def test_layers_named_by_number_are_the_first_of_each_chunk() -> None:
    config, chunks = pipeline("interleaved", 2, 4, 2, "training.recompute=full", "training.recompute_layers=2")
    assert recompute_of_layers(config, chunks) == ("full", "full", "none") * 4
    none, _ = pipeline("interleaved", 2, 4, 2)
    assert set(recompute_of_layers(none, chunks)) == {"none"}


def test_a_peak_by_hand() -> None:
    """Two stages, two micro-batches, 1F1B: the first holds two at its fullest; a layer that is recomputed whole comes
    on top as it was before."""
    config, chunks = pipeline("1f1b", 2, 2)
    stage_chunks = chunks[:1]
    saved, recomputed = (layer_bytes(config, kind) for kind in ("none", "full"))
    states: Set[PipelineState] = pipeline_states(config, 0)
    plain = peak_activation_bytes(config, stage_chunks, {0: "none", 1: "none", 2: "none"}, states)
    assert plain == 2 * (3 * saved + embedding_and_head_bytes(config, stage_chunks[0]))
    first = peak_activation_bytes(config, stage_chunks, {0: "full", 1: "none", 2: "none"}, states)
    # two layers are freed before it
    assert first == 2 * (2 * saved + recomputed + embedding_and_head_bytes(config, stage_chunks[0]))
    last = peak_activation_bytes(config, stage_chunks, {0: "none", 1: "none", 2: "full"}, states)
    assert last == first + saved - recomputed


def test_under_zero_bubble_the_first_stage_defers_nothing() -> None:
    config, chunks = pipeline("zero_bubble", 2, 2)
    stage_chunks = [chunk for chunk in chunks if chunk.stage == 0]
    peak = peak_activation_bytes(config, stage_chunks, dict.fromkeys(range(6), "none"), pipeline_states(config, 0))
    assert peak == 2 * (3 * layer_bytes(config, "none") + embedding_and_head_bytes(config, stage_chunks[0]))
    assert pipeline_states(config, 0) == pipeline_states(pipeline("1f1b", 2, 2)[0], 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_under_zero_bubble_a_later_stage_is_fullest_in_attention(compiled: bool) -> None:
    """The second of two stages, in the attention of its first layer, in the backward pass of the second of two
    micro-batches: what the first one's weight gradients need is still there; of the second, two layers are freed, and
    what their weight gradients need is deferred; of the layer itself, what lies behind attention is freed, 4 + f / h
    tensors of b s h, and 4 + 2 f / h are deferred. Compiled kernels need attention's output: one less is freed."""
    config, chunks = pipeline("zero_bubble", 2, 2, 1, f"node.compiled_kernels={compiled}")
    stage_chunks = [chunk for chunk in chunks if chunk.stage == 1]
    layer, stream, f = layer_bytes(config, "none"), 4 * config.model.seq_len * config.model.hidden, 4
    deferred = (8 + 2 * f) * stream
    before = 3 * deferred + 3 * layer + embedding_and_head_bytes(config, stage_chunks[0])
    fullest = before + 2 * (deferred - layer) - (4 - compiled + f) * stream + (4 + 2 * f) * stream
    assert config.model.ffn_size == f * config.model.hidden and config.model.dropout > 0
    assert (
        peak_activation_bytes(config, stage_chunks, dict.fromkeys(range(6), "none"), pipeline_states(config, 1))
        == fullest
    )


def test_a_plan_for_sixty_four_stages_counts_three_and_walks_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a plan must not grow with stages that are alike, nor with micro-batches."""
    config = load_run_config(
        preset="13b",
        overrides=[
            "model.layers=128",
            "layout.pp=64",
            "training.global_batch=512",
            "training.recompute=full",
            "training.recompute_budget_mib=8200",
        ],
    )
    counted: List[Tuple[Tuple[int, ...], Tuple[str, ...]]] = []
    chunk_sizes = memory._chunk_sizes

    def counting_chunk_sizes(config: RunConfig, chunks: Sequence[Chunk], kinds: Any, defers: bool) -> Any:
        counted.append((tuple(chunk.stage for chunk in chunks), tuple(kinds[i] for c in chunks for i in c.layers)))
        return chunk_sizes(config, chunks, kinds, defers)

    def no_order(*_: Any) -> None:
        raise AssertionError("the most micro-batches in flight of 1F1B need no schedule")

    monkeypatch.setattr(memory, "_chunk_sizes", counting_chunk_sizes)
    monkeypatch.setattr(memory, "stage_order", no_order)
    memory._pipeline_states.cache_clear()
    kinds = recompute_of_layers(config, split_layers(128, 64))
    assert kinds[:4] == ("full",) * 4 and kinds[-2:] == ("none",) * 2
    plans = [("none", "none"), ("full", "none"), ("full", "full")]  # of two layers, without dropout in attention
    assert counted == [*(((0,), plan) for plan in plans), *(((1,), plan) for plan in plans), ((63,), plans[0])]
