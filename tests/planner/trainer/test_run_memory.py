"""Tests of the memory model of this trainer: it equals the tensors, its categories add up, and savings save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.kernels.matmul_tiling import gemm_workspace_bytes
from fugaku_gpt.layout import memory
from fugaku_gpt.layout.flat import flat_elements, flat_layout_of
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.layout.memory import layer_bytes, peak_activation_bytes, pipeline_states, recompute_of_layers
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.layout.tensors import model_tensors
from fugaku_gpt.layout.trace_room import trace_room
from fugaku_gpt.machine.framework import framework_of, framework_on
from fugaku_gpt.model import build_model
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.gradient_path import GradientReducer
from fugaku_gpt.planner.trainer.run_memory import CATEGORIES, memory_of_run
from fugaku_gpt.records.trace import CALL_INT64S, PHASE_INT64S
from fugaku_gpt.training.trainer import Trainer
from tests.support.alive import AliveBytes
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rollback", ["null", "1"])
def test_lasting_categories_are_a_trainer_s_tensors(dtype: str, rollback: str) -> None:
    more = (f"training.dtype={dtype}", f"training.rollback_every={rollback}", "training.spike_ratio=100")
    config = tiny_config(*more)
    trainer = Trainer(config, ProcessGrid.alone(), ByteSamples(config.model.seq_len))
    trainer.step()
    measured, (predicted,) = trainer.memory_by_category(), memory_of_run(config).stages
    assert predicted["weights"] == measured["weights"] and predicted["gradients"] == measured["gradients"]
    # a gap of alignment before the token embedding belongs to no run of the optimiser
    assert 0 <= predicted["optimiser"] - measured["optimiser"] <= 0.005 * predicted["optimiser"]
    assert 0 <= predicted["copies"] - measured["copy for loss spikes"] <= 0.005 * predicted["optimiser"]
    assert (predicted["copies"] > 0) == (rollback == "1")


def test_in_16_bits_a_chunk_of_a_large_product_is_stored_until_it_is_summed() -> None:
    settings = ["model.seq_len=1024", "training.micro_batch=1", "node.threads_per_rank=2"]
    narrow, wide = (
        memory_of_run(load_run_config(preset="124m", overrides=[*settings, f"training.dtype={dtype}"])).stages[0]
        for dtype in ("bfloat16", "float32")
    )
    chunk, exponentials, product = 512 * 50304 * 2, 32 * 50304 * 4, 8192 * 768 * (2 + 4)
    assert narrow["logits"] == chunk + exponentials + product
    assert narrow["workspace"] == wide["workspace"] // 2 + 3072 * 768 * (2 + 4)  # where GELU is done again


@pytest.mark.parametrize(
    ("ffn", "dropout", "threads", "compiled", "fullest"),
    [
        (256, 0.0, 1, False, "GELU"),
        (256, 0.1, 1, False, "GELU"),
        (64, 0.0, 1, False, "attention"),
        (256, 0.1, 1, True, "GELU"),
        (64, 0.0, 16, True, "attention"),  # with fewer threads, blocks of scores are more
    ],
)
def test_workspace_of_a_layer_is_that_of_the_backward_pass(
    ffn: int, dropout: float, threads: int, compiled: bool, fullest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(compiled, threads, monkeypatch)
    config = layer_run(f"model.ffn_hidden={ffn}", f"model.dropout={dropout}", "model.heads=2")
    predicted = memory_of_run(config, threads=threads).stages[0]["workspace"]
    assert (predicted == (3 * ffn // 64 + 1) * STREAM) == (fullest == "GELU")
    assert measured_workspace(config) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    ("kv_heads", "ffn", "threads", "compiled", "fullest"),
    [
        (1, 16, 1, False, "attention"),
        (2, 16, 1, False, "attention"),
        (4, 16, 1, False, "attention"),
        (2, 256, 1, False, "SwiGLU"),
        (1, 64, 16, True, "attention"),
        (2, 64, 16, True, "attention"),
        (2, 256, 1, True, "SwiGLU"),
    ],
)
def test_workspace_of_a_llama_s_layer_is_that_of_the_backward_pass(
    kv_heads: int, ffn: int, threads: int, compiled: bool, fullest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(compiled, threads, monkeypatch)
    config = layer_run(f"model.ffn_hidden={ffn}", "model.heads=4", *LLAMA, f"model.kv_heads={kv_heads}")
    predicted = memory_of_run(config, threads=threads).stages[0]["workspace"]
    # SwiGLU's result, the gradients on both sides of it, the norm's, and two tensors that compiled kernels do not make
    assert (predicted == (6 * ffn // 64 + 1) * STREAM) == (fullest == "SwiGLU")
    unmade = 2 * ffn // 64 * STREAM if compiled and fullest == "SwiGLU" else 0
    assert measured_workspace(config) == pytest.approx(predicted - unmade, rel=0.01)


STREAM = 4 * 8 * 64 * 64  # bytes of [b, s, h] in float32
LLAMA = ("model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rope", "model.biases=none")


def use_kernels(compiled: bool, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets which kernels compute, and the number of threads, whatever was measured here or chosen by other tests."""
    if compiled and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", compiled)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", False)
    monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", False)
    monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", {torch.float32: False})


def layer_run(*settings: str) -> RunConfig:
    """A run of a single layer without attention dropout, 8 samples of 64 tokens."""
    shape = ("model.layers=1", "model.hidden=64", "model.seq_len=64", "model.attention_dropout=0")
    return load_run_config(overrides=[*shape, "training.micro_batch=8", "training.global_batch=8", *settings])


def measured_workspace(config: RunConfig) -> int:
    """The peak of a layer's backward pass beyond what its forward pass keeps, in bytes."""
    model = build_model(config, Communicator.alone()).train()
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    GradientReducer(buffers, {0: model}, ProcessGrid.alone(), sharded=False)
    with torch.no_grad():  # tables and masks that all layers share are made once
        model.blocks["0"](torch.randn(8, 64, 64), 0)
    with AliveBytes() as alive:
        x = torch.randn(8, 64, 64).requires_grad_()
        y = model.blocks["0"](x, 0)
        saved_bytes = layer_bytes(config, "none")
        assert alive.current_bytes == pytest.approx(saved_bytes + y.numel() * 4, rel=0.02)
        y.backward(torch.ones(8, 64, 64))
    # the gradient that comes is the workspace's, the layer's output that of the layer behind it
    return alive.peak_bytes - saved_bytes - y.numel() * 4


@st.composite
def layouts(draw: st.DrawFn) -> RunConfig:
    """Configurations of every kind of run."""
    schedule, chunks = draw(
        st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("zero_bubble", 1)])
    )
    dp, tp, pp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    micro = draw(st.sampled_from([1, 2]))
    model_settings: Dict[str, Any] = {
        "layers": draw(st.integers(pp * chunks, 8)),
        "hidden": 64,
        "heads": 4,
        "seq_len": 48,
        "vocab_size": 500,
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "embedding_layernorm": draw(st.booleans()),
    }
    overrides = [f"model.{key}={value}" for key, value in model_settings.items()]
    overrides += [f"layout.dp={dp}", f"layout.tp={tp}", f"layout.pp={pp}", f"layout.schedule={schedule}"]
    overrides += [f"layout.chunks={chunks}", f"layout.zero={draw(st.sampled_from([0, 1]))}"]
    overrides += [f"layout.order={draw(st.sampled_from(['tp,pp,dp', 'tp,dp,pp', 'pp,tp,dp']))}"]
    overrides += [f"layout.sequence_parallel={draw(st.booleans())}"]
    overrides += [f"training.micro_batch={micro}", f"training.global_batch={micro * dp * draw(st.integers(1, 6))}"]
    overrides += [f"training.dtype={draw(st.sampled_from(['float32', 'float64', 'bfloat16']))}"]
    overrides += [f"training.recompute={draw(st.sampled_from(['none', 'selective', 'full']))}"]
    overrides += [f"job.nodes={draw(st.sampled_from([n for n in range(1, 37) if dp * tp * pp % n == 0]))}"]
    overrides += [f"job.rank_map={draw(st.sampled_from(['', 'bychip', 'bynode', 'bynode:XYZ']))}"]
    return load_run_config(overrides=overrides)


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_categories_add_up_and_nodes_are_their_ranks(config: RunConfig) -> None:
    run_memory = memory_of_run(config)
    assert len(run_memory.stages) == config.layout.pp and all(tuple(stage) == CATEGORIES for stage in run_memory.stages)
    sums = [sum(stage.values()) for stage in run_memory.stages]
    assert run_memory.bytes_of_rank == max(sums) == sums[run_memory.peak_stage]
    assert all(size >= 0 for stage in run_memory.stages for size in stage.values())
    ranks = [coordinates_of(rank, config.layout, config.layout.order).pp for rank in range(config.layout.ranks)]
    nodes = [ranks[first : first + config.ranks_per_node] for first in range(0, len(ranks), config.ranks_per_node)]
    if config.job.rank_map.startswith("bynode"):
        nodes = [ranks[first :: config.job.nodes] for first in range(config.job.nodes)]
    assert run_memory.bytes_of_node == max(run_memory.bytes_of_ranks(node) for node in nodes)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_stages_that_are_counted_together_are_alike(config: RunConfig) -> None:
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    for stage, categories in enumerate(memory_of_run(config).stages):
        stage_chunks = [chunk for chunk in chunks if chunk.stage == stage]
        assert categories["activations"] == peak_activation_bytes(
            config, stage_chunks, kinds, pipeline_states(config, stage)
        )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_of_many_stages_few_are_counted(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: List[int] = []

    def count(config: RunConfig, *chunks: Any) -> Any:
        counted.append(1)
        return sizes(config, *chunks)

    sizes = memory._chunk_sizes
    monkeypatch.setattr(memory, "_chunk_sizes", count)
    overrides = [f"layout.schedule={schedule}", "layout.pp=500", "model.layers=500", "training.global_batch=8"]
    run_memory = memory_of_run(load_run_config(preset="tiny", overrides=overrides))
    assert len(run_memory.stages) == 500 and len(counted) <= 4
    assert len({stage["weights"] for stage in run_memory.stages}) == 3  # the first, the last, and all others


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_elements_are_those_of_the_flat_layout(config: RunConfig) -> None:
    for stage in range(config.layout.pp):
        stage_chunks = [chunk for chunk in chunks_of(config) if chunk.stage == stage]
        assert flat_elements(config, stage_chunks) == flat_layout_of(config, stage).elements


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return replace(config, **{section: replace(getattr(config, section), **values)})


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_memory_savings_never_take_more_memory(config: RunConfig) -> None:
    def rank_bytes(variant: RunConfig) -> int:
        return memory_of_run(variant).bytes_of_rank

    replicated, sharded = (rank_bytes(changed(config, "layout", zero=zero)) for zero in (0, 1))
    # buckets are padded so that they divide by the replicas: a few cache lines of each of three tensors and two buckets
    assert sharded <= replicated + 16 * 64 * config.layout.dp
    kinds = [rank_bytes(changed(config, "training", recompute=kind)) for kind in ("none", "selective", "full")]
    assert kinds[0] >= kinds[1]  # and full, but for one layer that keeps no more than its own input
    # inputs of deferred weight gradients are stored in any case; a stage may have a single layer
    few = config.model.layers < 2 * config.layout.pp * config.layout.chunks
    assert kinds[2] <= kinds[1] or few or config.layout.schedule == "zero_bubble"
    cut = [rank_bytes(changed(config, "layout", sequence_parallel=on)) for on in (False, True)]
    if config.layout.tp == 1:
        assert cut[0] == cut[1]


@pytest.mark.parametrize("preset", ["124m", "350m", "1.3b", "13b"])
def test_tensor_parallelism_and_sequence_parallelism_save_memory(preset: str) -> None:
    rank_bytes: List[int] = []
    for more in (["layout.tp=1"], ["layout.tp=2"], ["layout.tp=4"], ["layout.tp=4", "layout.sequence_parallel=true"]):
        rank_bytes.append(memory_of_run(load_run_config(preset=preset, overrides=more)).bytes_of_rank)
    assert rank_bytes == sorted(rank_bytes, reverse=True) and rank_bytes[0] > rank_bytes[-1]


def test_base_memory_of_a_rank_is_that_of_the_build() -> None:
    config = tiny_config()
    for build in ("1.7.1", "1.10.2+cpu", "2.13.0"):
        base = framework_of(build)
        assert memory_of_run(config, base).stages[0]["base"] == base.private_bytes + base.shared_bytes
    assert framework_of("2.99") == framework_of("2.13") == framework_of()


@pytest.mark.parametrize(("dtype", "later"), [("float32", 0), ("bfloat16", 768)])
def test_memory_of_compiled_products_counts_where_they_can_be_used(dtype: str, later: int) -> None:
    def base(*settings: str, **fields: Any) -> int:
        overrides = [f"training.dtype={dtype}", "training.micro_batch=1", "node.threads_per_rank=2", *settings]
        config = load_run_config(preset="124m", overrides=overrides)
        return memory_of_run(config, replace(framework_of(), **{"sixteen_bit_bytes": 0, **fields})).stages[0]["base"]

    without = base("node.compiled_kernels=false")
    assert base() - without == gemm_workspace_bytes(50304, later, 2)
    assert (
        base(has_native_matmul=False) == base("model.seq_len=32") == without
    )  # another machine, and rows that are too few
    assert base("node.compiled_products=off") == without
    separate = base(sixteen_bit_bytes=2**26) - without  # kernels of oneDNN's, which then make the products
    assert separate == (gemm_workspace_bytes(50304, later, 2) if dtype == "float32" else 2**26)


def test_a_processor_that_multiplies_bfloat16_itself_needs_fewer_kernels_for_it() -> None:
    build = framework_of("2.13")
    assert framework_on(build, ["avx2", "fma"]) == build
    narrow = framework_on(build, ["avx512f", "avx512_bf16", "avx2"])
    assert narrow == replace(build, sixteen_bit_bytes=narrow.sixteen_bit_bytes)
    assert 0 < narrow.sixteen_bit_bytes < build.sixteen_bit_bytes


def test_free_blocks_are_fewer_where_large_tensors_are_pooled() -> None:
    def waste(pooled: bool, recompute: str = "none", batch: int = 64) -> int:
        overrides = [f"training.recompute={recompute}", f"training.micro_batch={batch}", "training.global_batch=64"]
        config = load_run_config(preset="tiny", overrides=overrides)
        return memory_of_run(config, replace(framework_of("2.13"), has_tensor_pool=pooled)).stages[0]["allocator"]

    for kind in ("none", "full"):
        assert 0 < waste(True, kind, 1) <= waste(True, kind) < waste(False, kind)
    assert waste(True) != waste(True, "full")


def test_a_trace_counts_in_the_memory_of_every_rank() -> None:
    without = memory_of_run(load_run_config(preset="tiny"))
    traced = memory_of_run(load_run_config(preset="tiny", overrides=["training.trace_iterations=2-3"]))
    more = traced.stages[0]["copies"] - without.stages[0]["copies"]
    calls, phases = trace_room(load_run_config(preset="tiny"), 0, 2)
    assert more == 8 * (calls * CALL_INT64S + phases * PHASE_INT64S) > 2**19
    assert traced.bytes_of_rank == without.bytes_of_rank + more
    staged = ["layout.pp=2", "training.trace_iterations=1-100", "training.iterations=100"]
    assert all(
        stage["copies"] > 2**19 for stage in memory_of_run(load_run_config(preset="tiny", overrides=staged)).stages
    )
